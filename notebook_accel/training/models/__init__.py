"""Prepared models: their tied weights and replaced forwards.

Tied weights (one parameter under several names) are found and tied again; a forward is put in place
of a module's own, and taken off.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accel.private import of_torch
from notebook_accel.training.collectives.nested import convert_to_fp32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch.nn import Module


__all__ = [
    "AutocastForward",
    "PreparedModel",
    "RemovableForward",
    "ReplacedForward",
    "forward_of",
    "replaced_forwards",
    "retie_parameters",
    "strip_forward",
    "tied_names",
    "uncompiled",
]


class ReplacedForward:
    """A callable in place of one module's forward; :attr:`plain` is the forward before it.

    It sits in the instance's ``__dict__``, so the module stays of its class and keeps its name,
    attributes and state. A deep copy (an average of the weights, say) gets one of its own; a
    pickled module comes back with its plain forward.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")
        # Not its attributes: those of another ReplacedForward would take the place of ours.
        functools.update_wrapper(self, self.plain, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)

    @property
    def plain(self) -> Callable[..., Any]:
        """The forward that was there before."""
        return forward_of(self.module, self.replaced)

    def put_back(self) -> None:
        """Remove this forward: the module calls :attr:`plain` again."""
        forwards = [*replaced_forwards(self.module)]
        outer = forwards[forwards.index(self) - 1] if self is not forwards[0] else None
        if outer is not None:
            outer.replaced = self.replaced
            outer.__wrapped__ = outer.plain  # type: ignore[attr-defined]
        elif self.replaced is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedForward:
        # Not copy.copy: it goes through `__reduce__`, which gives another forward.
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        memo[id(self)] = new
        new.module = copy.deepcopy(self.module, memo)
        new.replaced = copy.deepcopy(self.replaced, memo)
        new.__wrapped__ = new.plain  # type: ignore[attr-defined]
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return (forward_of, (self.module, self.replaced))


class RemovableForward(ReplacedForward):
    """A replaced forward that ``unwrap_model(keep_fp32_wrapper=False)`` removes."""


class AutocastForward(RemovableForward):
    """The forward of one module under autocast, with float32 outputs."""

    def __init__(
        self,
        module: Module,
        autocast: Callable[[], AbstractContextManager[Any, bool | None]],
    ) -> None:
        super().__init__(module)
        self.autocast = autocast

    @classmethod
    def install(
        cls, module: Module, autocast: Callable[[], AbstractContextManager[Any, bool | None]]
    ) -> None:
        """Put the forward of ``module`` under ``autocast``."""
        module.__dict__["forward"] = cls(module, autocast)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.autocast():
            outputs = self.plain(*args, **kwargs)
        return convert_to_fp32(outputs)


def replaced_forwards(module: Module) -> Iterator[ReplacedForward]:
    """Yield the replaced forwards of ``module``, the outermost first."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, ReplacedForward):
        yield forward
        forward = forward.replaced


def strip_forward(module: Module, kind: type[ReplacedForward] = RemovableForward) -> None:
    """Remove the replaced forwards of a kind from ``module``; others stay."""
    for forward in [*replaced_forwards(module)]:
        if isinstance(forward, kind):
            forward.put_back()


def uncompiled(module: Module) -> Module:
    """The module that ``torch.compile`` was given, or the module itself."""
    return of_torch.original_module(module)


def forward_of(module: Module, replaced: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the forward of a module without a :class:`ReplacedForward`, once it is unpickled."""
    return replaced or type(module).forward.__get__(module)


@dataclass(frozen=True)
class PreparedModel:
    """A prepared model: the user's model, and the wrapper that the loop calls.

    Attributes:
        inner: the model.
        wrapped: what the user calls.
        training: whether it is trained.
        meta_copy: the model without weights, as it was before the strategy spread it; None where it
            did not.
    """

    inner: Module
    wrapped: Module
    training: bool
    meta_copy: Module | None = None


def tied_names(model: Module) -> list[list[str]]:
    """The groups of names that stand for one parameter, each in the order of the model's modules.

    The first name is that of the module whose initial values a tied weight has: of the embedding,
    where ``head.weight = embedding.weight`` was said.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def retie_parameters(model: Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make each group of names one parameter again: the first that is not on the meta device.

    A group whose parameters are all on the meta device stays as it is.

    Args:
        model: whose weights were loaded or moved name by name.
        tied_params: as :func:`tied_names` gave them before.
    """
    for group in tied_params:
        found = (model.get_parameter(name) for name in group)
        parameter = next((one for one in found if one.device.type != "meta"), None)
        for name in group if parameter is not None else ():
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, parameter)
