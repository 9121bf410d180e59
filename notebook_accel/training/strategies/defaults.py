"""What training loops and checkpoints ask of a strategy, as it is on one device.

The weights are whole, or sharded by their user.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.errors import ConfigError
from notebook_accel.private import of_torch
from notebook_accel.training.files import Format
from notebook_accel.training.models import has_parts, weights_of
from notebook_accel.training.precision import LossScaling
from notebook_accel.training.processes.topology import Topology
from notebook_accel.training.stepping.step_timer import step_timer
from notebook_accel.training.strategies.strategy_request import LossFunction, call_model

if TYPE_CHECKING:
    from notebook_accel.training.strategies.context import SequenceDivider


def dtensors_of(tensors: Iterable[Any]) -> ModuleType | None:
    """Return ``strategies.dtensors`` if a tensor is sharded; only then its import is needed."""
    return import_module(".dtensors", __package__) if has_parts(tensors) else None


def sharded(**given: Any) -> Format:
    """Return the format of shards; torch's distributed checkpoints take 0.3 s to import."""
    from notebook_accel.training.files.sharded import Sharded

    return Sharded(**given)


class _SpreadScaler(torch.amp.GradScaler):
    """A ``GradScaler`` for optimizers with plain gradients, sharded gradients, or both."""


def _unscale(
    as_torch: Callable[..., Any], optimizer: Optimizer, found_inf: torch.Tensor
) -> dict[torch.device, torch.Tensor]:
    dtensors = dtensors_of(weights_of(optimizer))
    found: dict[torch.device, torch.Tensor] = (
        dtensors.unscale_in_parts(as_torch, optimizer, found_inf)
        if dtensors
        else as_torch(optimizer)
    )
    return found


of_torch.unscale_by(_SpreadScaler, _unscale)


class _SpreadScaling(LossScaling):
    kind_of_scaler = _SpreadScaler


class StrategyDefaults:
    """Backward, clipping, loss scaling and state dicts of a :class:`Strategy`.

    Attributes:
        scaling: None if losses are not scaled, or if the library scales them (DeepSpeed).
        sequences: divides sequences over the ranks; None without context parallelism.
    """

    kind_of_scaling: type[LossScaling] = _SpreadScaling
    scaling: LossScaling | None
    topology: Topology
    spread: weakref.WeakSet[Module]
    """Prepared models of which this rank has only a part of the weights."""
    sequences: SequenceDivider | None = None
    spreads_weights: bool = False
    was_given_parts: bool = False
    """Whether the user has sharded a model before it was prepared."""
    joins_later: bool = True
    """Whether the notebook can join the state dicts that :meth:`state_dict` gives of parts."""

    def backward(self, loss: torch.Tensor, num_steps: int = 1, **kwargs: Any) -> None:
        if num_steps > 1:
            loss = loss / num_steps
        if self.scaling is not None:
            loss = self.scaling.scale(loss)
        with step_timer().backward(loss):
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def forward_backward(
        self, model: Module, inputs: Any, targets: Any, loss_function: LossFunction, num_steps: int
    ) -> torch.Tensor:
        """Run forward, loss and backward of one batch; return the loss, detached."""
        loss = loss_function(call_model(model, inputs), targets)
        self.backward(loss, num_steps)
        return loss.detach()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip the norm of the gradients, in place; return the norm before clipping.

        If weights are sharded, the norm is that over all shards, and all ranks call this together.
        """
        weights = list(parameters)
        if (dtensors := dtensors_of(weights)) is None:
            return torch.nn.utils.clip_grad_norm_(weights, max_norm, norm_type=norm_type)
        norm: torch.Tensor = dtensors.clip_grad_norm(
            weights, max_norm, norm_type, self.topology.device
        )
        return norm

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each element of the gradients to [-clip_value, clip_value], in place."""
        weights = list(parameters)
        dtensors = dtensors_of(weights)
        for group in dtensors.by_mesh(weights) if dtensors else [weights]:
            torch.nn.utils.clip_grad_value_(group, clip_value)

    def drop_unreduced(self, optimizer: Optimizer) -> None:
        """Drop accumulated gradients that are not yet in the weights' ``grad``."""
        # Asked by every zero_grad: all weights are looked at only where there is something to drop.
        if self.spread and (dtensors := dtensors_of(weights_of(optimizer))):
            weights = {id(weight) for weight in weights_of(optimizer)}
            for model in self.spread:
                dtensors.drop_unreduced(model, weights)

    def scale_by(self, scaler: torch.amp.GradScaler | None) -> None:
        """Scale losses with another ``GradScaler`` from now on; None turns loss scaling off."""
        kind = self.kind_of_scaling
        if scaler is not None and not isinstance(scaler, kind.kind_to_set):
            raise ConfigError(
                f"accelerator.scaler is set to a {type(scaler).__name__}: expected None or a "
                f"{kind.kind_to_set.__name__}, which the Accelerator has made: set it up by "
                "kwargs_handlers=[GradScalerKwargs(...)]"
            )
        # The property brings the scaler up to date with the last step first.
        before = None if self.scaling is None else self.scaling.scaler
        if scaler is not before:
            self.scaling = None if scaler is None else kind(scaler)

    # For checkpoints.

    @property
    def saves_shards(self) -> bool:
        """Whether each rank writes its shards of the weights.

        If False, rank 0 writes full weights.
        """
        return False

    @property
    def format(self) -> Callable[..., Format]:
        """How checkpoints keep the models and optimizers: a subclass of ``Format``."""
        return sharded if self.saves_shards else Format

    @property
    def saves_together(self) -> bool:
        """Whether all ranks must take part in saving, since each has only a part of a model."""
        return self.saves_shards or self.spreads_weights or self.was_given_parts

    def state_dict(self, model: Module, *, full: bool, keeps: bool = True) -> dict[str, Any]:
        """Return the state dict of an unwrapped model; with sharded weights, all ranks call it.

        Args:
            full: whether sharded tensors are joined to full ones. False returns this rank's shards,
                without a collective.
            keeps: False for a rank that only helps to join tensors for other ranks. Such a rank may
                get an empty dictionary, which saves memory.
        """
        dtensors = dtensors_of(model.parameters()) if full else None
        if dtensors is None:
            return model.state_dict()
        whole: dict[str, Any] = dtensors.whole_state_dict(model, keeps=keeps, to_cpu=True)
        return whole

    def is_in_parts(self, model: Module) -> bool:
        """Return whether this rank has only a part of a prepared model's weights."""
        # Not by its weights: while a forward runs, those of a sharded module are whole.
        return model in self.spread

    def load_state_dict(self, model: Module, state: dict[str, Any], *, strict: bool = True) -> None:
        """Load full (unsharded) weights into a model without wrapper; all ranks call it."""
        model.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer, *, keeps: bool = True) -> dict[str, Any]:
        """Return the full state dict of an optimizer; with sharded weights, all ranks call it."""
        if (dtensors := dtensors_of(weights_of(optimizer))) is None:
            return optimizer.state_dict()
        whole = dtensors.make_whole(optimizer.state_dict(), keeps=keeps, to_cpu=True)
        return whole if keeps else {}

    def own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return this rank's part without a collective.

        None if the notebook could not join the parts.
        """
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a full (unsharded) state dict into an optimizer; all ranks call it."""
        dtensors = dtensors_of(weights_of(optimizer))
        if dtensors is None:
            optimizer.load_state_dict(state)
        else:
            dtensors.load_optimizer_state(optimizer, state)

    def read_own(self, folder: Path, options: dict[str, Any], *, strict: bool) -> bool:
        """Load what the strategy's library wrote; False if the checkpoint has no such files."""
        return False

    def make_whole(self, values: Any) -> Any:
        """Return nested ``values`` with sharded tensors joined to full ones; all ranks call it."""
        if not self.saves_together:
            return values
        from notebook_accel.training.strategies import dtensors

        return dtensors.make_whole(values, to_cpu=True)
