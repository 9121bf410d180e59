"""Models on their way in and out: a forward that computes in another precision, and back."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from notebook_accel.training.nested import convert_to_fp32

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch.nn import Module

__all__ = ["AutocastForward", "strip_forward", "uncompiled"]


class AutocastForward:
    """The forward of one module under autocast, with float32 outputs.

    It sits in the instance's ``__dict__``, so the module stays of its class and keeps its name,
    attributes and state. A deep copy (an average of the weights, say) gets one of its own; a
    pickled module comes back with its plain forward.
    """

    def __init__(
        self,
        module: Module,
        autocast: Callable[[], AbstractContextManager[Any, bool | None]],
        replaced: Callable[..., Any] | None,
    ) -> None:
        self.module = module
        self.autocast = autocast
        self.replaced = replaced
        functools.update_wrapper(self, self.plain)

    @classmethod
    def install(
        cls, module: Module, autocast: Callable[[], AbstractContextManager[Any, bool | None]]
    ) -> None:
        """Put the forward of ``module`` under ``autocast``."""
        module.__dict__["forward"] = cls(module, autocast, module.__dict__.get("forward"))

    @property
    def plain(self) -> Callable[..., Any]:
        """The forward that was there before."""
        return self.replaced or _class_forward(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.autocast():
            outputs = self.plain(*args, **kwargs)
        return convert_to_fp32(outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> AutocastForward:
        module = copy.deepcopy(self.module, memo)
        return AutocastForward(module, self.autocast, copy.deepcopy(self.replaced, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_forward_of, (self.module, self.replaced))


def strip_forward(module: Module) -> None:
    """Give ``module`` back the forward that it had before :meth:`AutocastForward.install`."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, AutocastForward):
        return
    if forward.replaced is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward.replaced


def uncompiled(module: Module) -> Module:
    """The module that ``torch.compile`` was given, or the module itself."""
    inner: Module = getattr(module, "_orig_mod", module)
    return inner


def _class_forward(module: Module) -> Callable[..., Any]:
    bound: Callable[..., Any] = type(module).forward.__get__(module)
    return bound


def _forward_of(module: Module, replaced: Callable[..., Any] | None) -> Callable[..., Any]:
    return replaced or _class_forward(module)
