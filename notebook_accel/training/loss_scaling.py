"""Loss scaling for float16: the gradients are kept in range, and overflows skip a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch.optim import Optimizer

__all__ = ["LossScaling"]


class LossScaling:
    """A ``GradScaler`` whose scale holds for all optimizers of one backward.

    The scale is updated before the next loss is scaled rather than after each optimizer's step:
    a second optimizer would otherwise divide gradients by a scale that they were not made with.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._is_used = False  # whether the gradients of the last backward were stepped or cleared
        self._done: set[int] = set()  # ids of the optimizers whose gradients are unscaled

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The scaler, up to date."""
        self._settle()
        return self._scaler

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, times the scale."""
        self._settle()
        return self._scaler.scale(loss)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the optimizers' gradients by the scale, once from one backward to the next."""
        for optimizer in optimizers:
            if id(optimizer) not in self._done and _has_gradients(optimizer):
                self._done.add(id(optimizer))
                self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
        """Step unless a gradient overflowed.

        Returns:
            what the optimizer's step gave, and whether it was skipped.
        """
        given = () if closure is None else (closure,)
        if not _has_gradients(optimizer):
            return optimizer.step(*given), False
        result = self._scaler.step(optimizer, *given)
        self._is_used = True
        self._done.add(id(optimizer))
        found = self._scaler._found_inf_per_device(optimizer)
        return result, any(bool(value.item()) for value in found.values())

    def forget(self, optimizer: Optimizer) -> None:
        """Note that the optimizer's gradients were cleared, whether a step used them or not.

        Those of the next backward are unscaled anew, and an overflow that was found in the ones
        that are gone still lowers the scale.
        """
        if id(optimizer) in self._done:
            self._is_used = True

    def _settle(self) -> None:
        if self._is_used:
            self._is_used = False
            self._done.clear()
            self._scaler.update()


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(
        parameter.grad is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
