"""What checkpoints ask of a strategy: here for a model that is whole, or sharded by its user."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.training.files.formats import Format
from notebook_accel.training.models import has_parts, weights_of


def sharded(**given: Any) -> Format:
    """Return the format of shards; torch's distributed checkpoints take 0.3 s to import."""
    from notebook_accel.training.files.sharded import Sharded

    return Sharded(**given)


class ForCheckpoints:
    """Weights and optimizer states of a :class:`Strategy`, whole or in parts."""

    spreads_weights: bool = False
    spread: weakref.WeakSet[Module]
    was_given_parts: bool = False
    """Whether the user has sharded a model before it was prepared."""
    joins_later: bool = True
    """Whether the notebook can join the state dicts that :meth:`state_dict` gives of parts."""

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
        if not full or not has_parts(model.parameters()):
            return model.state_dict()
        from notebook_accel.training.strategies import dtensors

        return dtensors.whole_state_dict(model, keeps=keeps, to_cpu=True)

    def is_in_parts(self, model: Module) -> bool:
        """Return whether this rank has only a part of a prepared model's weights."""
        # Not by its weights: while a forward runs, those of a sharded module are whole.
        return model in self.spread

    def load_state_dict(self, model: Module, state: dict[str, Any], *, strict: bool = True) -> None:
        """Load full (unsharded) weights into a model without wrapper; all ranks call it."""
        model.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer, *, keeps: bool = True) -> dict[str, Any]:
        """Return the full state dict of an optimizer; with sharded weights, all ranks call it."""
        if not has_parts(weights_of(optimizer)):
            return optimizer.state_dict()
        from notebook_accel.training.strategies import dtensors

        whole = dtensors.make_whole(optimizer.state_dict(), keeps=keeps, to_cpu=True)
        return whole if keeps else {}

    def own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return this rank's part without a collective.

        None if the notebook could not join the parts.
        """
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a full (unsharded) state dict into an optimizer; all ranks call it."""
        if not has_parts(weights_of(optimizer)):
            optimizer.load_state_dict(state)
            return
        from notebook_accel.training.strategies import dtensors

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
