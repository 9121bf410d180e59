"""Loss scaling for float16.

The loss is multiplied by a scale, so that small gradients do not become 0 in float16. A step whose
gradients overflow is skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from notebook_accel.private import of_torch
from notebook_accel.training.models import weights_of


class LossScaling:
    """Wraps a ``GradScaler`` so that all optimizers divide by the scale that the loss had.

    The scale is updated only before the next loss is scaled. If it were updated after each
    optimizer's step, a second optimizer would divide gradients by another scale than the loss had.
    """

    kind_of_scaler: ClassVar[type[torch.amp.GradScaler]] = torch.amp.GradScaler
    # Of a scaler that the user sets (``accelerator.scaler``).
    kind_to_set: ClassVar[type[torch.amp.GradScaler]] = torch.amp.GradScaler

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._is_used = False  # whether the gradients of the last backward were stepped or cleared
        # The optimizers whose gradients are unscaled, by their ids.
        self._done: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        # Their gradients, as the newest backward found them.
        self._found: dict[int, list[tuple[int, int]]] = {}

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """Torch's scaler; reading this property may update its scale first.

        The scale is updated if an optimizer has stepped, or gradients were cleared, since the
        previous update.
        """
        self._settle()
        return self._scaler

    def begin_backward(self) -> torch.amp.GradScaler:
        """Return the scaler for the losses of a new backward.

        The scale is updated first, if the gradients of the backwards so far were used by a step or
        cleared. Every rank has to call this before its backward, since the subclass for sharded
        weights asks all ranks whether gradients were cleared.
        """
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
        """Return the loss times the scale, for the backward that follows; every rank calls it."""
        return self.begin_backward().scale(loss)

    def unscale(
        self,
        optimizers: Iterable[Optimizer],
        parameters: Collection[torch.Tensor] | None = None,
    ) -> None:
        """Divide the optimizers' gradients by the scale; skip those that were divided already.

        All ranks have to call it.

        Args:
            parameters: only optimizers that have at least one of these parameters are treated; None
                means all optimizers.

        Raises:
            RuntimeError: a backward has added scaled gradients to gradients that were divided
                before.
        """
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        for optimizer in optimizers:
            is_wanted = _has_gradients(optimizer) and (
                wanted is None or any(id(weight) in wanted for weight in weights_of(optimizer))
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

    def step(
        self, optimizer: Optimizer, closure: Callable[[], float] | None
    ) -> tuple[Any, torch.Tensor | None]:
        """Divide an optimizer's gradients by the scale; let it step, unless they overflowed.

        Args:
            closure: computes the loss again, for the optimizer's ``step``; None: no closure.

        Returns:
            What the optimizer's ``step`` returned, and a tensor on the device that is not 0 if a
            gradient overflowed; None if none was looked at.
        """
        given = () if closure is None else (closure,)
        if not self.is_so_anywhere(_has_gradients(optimizer)):
            return optimizer.step(*given), None
        result = self._scaler.step(optimizer, *given)
        self._is_used = True
        self._done[id(optimizer)] = optimizer
        if not self._scaler.is_enabled():  # one that the user set: it keeps no account
            return result, None
        return result, of_torch.overflow(self._scaler, optimizer)

    def forget(self, optimizer: Optimizer) -> None:
        """Record that the optimizer's gradients were cleared, whether a step used them or not.

        The gradients of the next backward will be divided by the scale again. If the cleared
        gradients had overflowed, the scale is still lowered.
        """
        if id(optimizer) in self._done:
            self._is_used = True

    def is_so_anywhere(self, is_so: bool) -> bool:
        """Return whether ``is_so`` is True on at least one rank.

        This base class returns ``is_so`` without asking other ranks: all ranks have gradients of
        the same weights, so ``is_so`` is the same on each. Subclasses for sharded weights ask all
        ranks, which have to call this method together.
        """
        return is_so

    def _settle(self) -> None:
        if self._is_used:
            self._is_used = False
            self._done.clear()
            self._scaler.update()


def gradient_marks(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Return a list that differs after every backward, to detect whether there was one.

    For each weight it has the ``id`` of its gradient, and how often torch has changed that tensor.
    """
    return [
        (id(weight.grad), 0 if weight.grad is None else of_torch.count_of_changes(weight.grad))
        for weight in weights_of(optimizer)
    ]


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(weight.grad is not None for weight in weights_of(optimizer))
