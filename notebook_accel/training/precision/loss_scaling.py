"""Loss scaling for float16: the gradients are kept in range, and overflows skip a step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from notebook_accel.private import of_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch.optim import Optimizer

__all__ = ["LossScaling", "gradient_marks"]


class LossScaling:
    """A ``GradScaler`` whose scale holds for all optimizers of one backward.

    The scale is updated before the next loss is scaled rather than after each optimizer's step:
    a second optimizer would otherwise divide gradients by a scale that they were not made with.

    Attributes:
        kind_of_scaler: the class of the scaler that this is for.
    """

    kind_of_scaler: ClassVar[type[torch.amp.GradScaler]] = torch.amp.GradScaler

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._is_used = False  # whether the gradients of the last backward were stepped or cleared
        # The optimizers whose gradients are unscaled, by their ids.
        self._done: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        # Their gradients, as the newest backward found them.
        self._found: dict[int, list[tuple[int, int]]] = {}

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The scaler, up to date."""
        self._settle()
        return self._scaler

    def begin_backward(self) -> torch.amp.GradScaler:
        """The scaler for the losses of a backward that begins; every rank calls it."""
        if not self._is_used:
            # Gradients may be cleared without their optimizer: by the model's zero_grad, say.
            self._is_used = any(
                not self.is_so_anywhere(_has_gradients(optimizer))
                for optimizer in list(self._done.values())
            )
        self._settle()
        self._found = {key: gradient_marks(optimizer) for key, optimizer in self._done.items()}
        return self._scaler

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of a backward that begins, times the scale."""
        return self.begin_backward().scale(loss)

    def unscale(
        self,
        optimizers: Iterable[Optimizer],
        parameters: Collection[torch.Tensor] | None = None,
    ) -> None:
        """Divide the optimizers' gradients by the scale, once from one backward to the next.

        Args:
            optimizers: the same on every rank, in one order.
            parameters: only optimizers that step at least one of these; all unless given.

        Raises:
            RuntimeError: a backward has added to gradients that are unscaled already.
        """
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        for optimizer in optimizers:
            is_wanted = _has_gradients(optimizer) and (
                wanted is None or any(id(weight) in wanted for weight in _weights_of(optimizer))
            )
            if id(optimizer) in self._done:
                if is_wanted:
                    self._refuse_mixed(optimizer)
            elif self.is_so_anywhere(is_wanted):
                self._done[id(optimizer)] = optimizer
                self._scaler.unscale_(optimizer)

    def _refuse_mixed(self, optimizer: Optimizer) -> None:
        # Taken out: what changes them from here until the next backward (clipping) is meant to.
        found = self._found.pop(id(optimizer), None)
        if found is not None and found != gradient_marks(optimizer):
            raise RuntimeError(
                f"gradients of {type(optimizer).__name__} were divided by the loss scale, and a "
                "backward has then added others that are not: clip and unscale once a window "
                "(if accelerator.sync_gradients: ...), and clear gradients that no step is to use "
                "with optimizer.zero_grad()"
            )

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
        """Step unless a gradient overflowed.

        Returns:
            what the optimizer's step gave, and whether it was skipped.
        """
        given = () if closure is None else (closure,)
        if not self.is_so_anywhere(_has_gradients(optimizer)):
            return optimizer.step(*given), False
        result = self._scaler.step(optimizer, *given)
        self._is_used = True
        self._done[id(optimizer)] = optimizer
        if not self._scaler.is_enabled():  # one that the user set: it keeps no account
            return result, False
        return result, of_torch.overflowed(self._scaler, optimizer)

    def forget(self, optimizer: Optimizer) -> None:
        """Note that the optimizer's gradients were cleared, whether a step used them or not.

        Those of the next backward are unscaled anew, and an overflow that was found in the ones
        that are gone still lowers the scale.
        """
        if id(optimizer) in self._done:
            self._is_used = True

    def is_so_anywhere(self, is_so: bool) -> bool:
        """Whether it is so on one rank or more. Here all ranks have gradients of the same weights,
        so that the answer of each is that of all."""
        return is_so

    def _settle(self) -> None:
        if self._is_used:
            self._is_used = False
            self._done.clear()
            self._scaler.update()


def gradient_marks(optimizer: Optimizer) -> list[tuple[int, int]]:
    """What changes with every backward: which tensors, and how often each was written to."""
    return [
        (id(weight.grad), 0 if weight.grad is None else of_torch.count_of_changes(weight.grad))
        for weight in _weights_of(optimizer)
    ]


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(weight.grad is not None for weight in _weights_of(optimizer))


def _weights_of(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (weight for group in optimizer.param_groups for weight in group["params"])
