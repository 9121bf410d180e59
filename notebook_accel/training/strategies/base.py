"""What a kind of parallelism may do in its own way: ten hooks, each with a meaning for one device.

A new kind is a file with a class that overrides the hooks which it needs, and one line in the
table of ``strategies/__init__.py``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer

    from notebook_accel.training.settings import DistributedType, KwargsHandler
    from notebook_accel.training.topology import Topology

__all__ = ["Strategy"]


class Strategy:
    """How models are spread over the ranks.

    Attributes:
        distributed_type: what ``accelerator.distributed_type`` says; None for the topology's.
        wrappers: qualified names of the classes in which ``prepare_model`` wraps a model, whose
            ``module`` is the model itself.
        place: where this rank stands.
        handlers: the ``kwargs_handlers`` that the user gave.
    """

    distributed_type: ClassVar[DistributedType | None] = None
    wrappers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, place: Topology, handlers: Sequence[KwargsHandler] = ()) -> None:
        self.place = place
        self.handlers = handlers

    @property
    def num_replicas(self) -> int:
        """Number of shares into which batches are divided: ranks with different data."""
        return self.place.num_processes

    @property
    def replica(self) -> int:
        """Which share this rank takes."""
        return self.place.process_index

    def prepare_model(
        self,
        model: Module,
        *,
        training: bool,
        optimizers: Sequence[Optimizer],
        device: torch.device | None,
    ) -> Module:
        """The model as it is to be called.

        Args:
            model: the user's.
            training: False for a model that is only evaluated.
            optimizers: those that are prepared in the same call.
            device: where to put the model, None to leave it where it is.
        """
        return model if device is None else model.to(device)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer that steps the prepared models' parameters."""
        return optimizer

    def gradient_sync(
        self,
        model: Module,
        enabled: bool,
    ) -> AbstractContextManager[Any]:
        """While it is entered, backward exchanges gradients between ranks, or does not."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss that is ready: divided and scaled."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip the gradients to a norm over all ranks; gives the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value]."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def state_dict(self, model: Module, *, full: bool) -> dict[str, Any]:
        """The weights of a model without wrapper: whole, or (``full=False``) this rank's part."""
        return model.state_dict()

    def load_state_dict(self, model: Module, state: dict[str, Any], *, strict: bool = True) -> None:
        """Put weights into a model without wrapper, whole or in parts as they were saved."""
        model.load_state_dict(state, strict=strict)

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def close(self) -> None:
        """Give back what the strategy made for itself."""
