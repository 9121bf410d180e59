"""Helpers for prepared models and optimizers: weights, tied weights, replaced forwards.

Tied weights (one parameter under several names) are found, and tied again after the weights were
loaded or moved. A module's ``forward`` is replaced by a wrapping callable, which can be removed.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.private import of_torch


@dataclass(eq=False, repr=False)
class ReplacedForward:
    """Base class of callables that replace one module's ``forward`` and wrap the former one.

    Each object is stored in its module's ``__dict__["forward"]``, so the module keeps its class,
    names, attributes and state dict. A module may have several, one around the other. A deep copy
    of the module (as for averaged weights) gets its own copy of this object; a module that is
    pickled and unpickled has its original forward.

    Attributes:
        replaced: the former ``__dict__["forward"]``; None if the module had only the forward of its
            class.
    """

    module: Module
    replaced: Callable[..., Any] | None = field(init=False)

    def __post_init__(self) -> None:
        self.replaced = self.module.__dict__.get("forward")
        # Not its attributes: those of another ReplacedForward would take the place of ours.
        functools.update_wrapper(self, self.plain, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)

    @property
    def plain(self) -> Callable[..., Any]:
        """The forward that this object replaced, as a bound callable."""
        return forward_of(self.module, self.replaced)

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
    """Base class of replaced forwards that ``unwrap_model(keep_fp32_wrapper=False)`` removes."""


def replaced_forwards(module: Module) -> Iterator[ReplacedForward]:
    """Yield the :class:`ReplacedForward` objects of ``module``, the outermost first."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, ReplacedForward):
        yield forward
        forward = forward.replaced


def strip_forward(module: Module, kind: type[ReplacedForward] = RemovableForward) -> None:
    """Remove replaced forwards that are instances of ``kind`` from ``module``; others stay."""
    outer: ReplacedForward | None = None
    for forward in [*replaced_forwards(module)]:
        if not isinstance(forward, kind):
            outer = forward
        elif outer is not None:
            outer.replaced = forward.replaced
            outer.__wrapped__ = outer.plain  # type: ignore[attr-defined]
        elif forward.replaced is not None:
            module.__dict__["forward"] = forward.replaced
        else:
            del module.__dict__["forward"]


def weights_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the weights that an optimizer steps, in the order of its groups."""
    return (weight for group in optimizer.param_groups for weight in group["params"])


def has_parts(tensors: Iterable[Any]) -> bool:
    """Return whether any of the tensors is a ``DTensor``, of which this rank has only a part."""
    # Not imported, which takes a second: what has made a DTensor has done that.
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and any(isinstance(value, loaded.DTensor) for value in tensors)


def local_part(value: Any) -> torch.Tensor:
    """Return this rank's shard of a ``DTensor``; return a plain tensor unchanged."""
    part: torch.Tensor = value.to_local() if has_parts([value]) else value
    return part


def joined_state_dict(
    model: Module, join: Callable[[str, Any], Any], *, keeps: bool
) -> dict[str, Any]:
    """Return a state dict of joined values; empty if not ``keeps``.

    All ranks join the same values, one after the other, whether they keep them or not. So whole
    weights lie side by side only where they are kept.
    """
    joined: dict[int, Any] = {}  # by identity: tied names share their whole weight, too
    whole: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in joined:
            made = join(name, value)
            joined[id(value)] = made if keeps else None
        if keeps:
            whole[name] = joined[id(value)]
    return whole


@contextmanager
def set_within(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside a ``with`` block; after it they are as before."""
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def forward_of(module: Module, replaced: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return ``replaced`` if it is not None, else the class's forward, bound to ``module``.

    :class:`ReplacedForward` objects are pickled as a call of this function, so that pickles contain
    its name.
    """
    return replaced or type(module).forward.__get__(module)


@dataclass(frozen=True)
class PreparedModel:
    """A prepared model: the user's model, and the wrapper that the loop calls.

    Attributes:
        training: False for a model that was prepared for evaluation only.
        meta_copy: a copy of the model from before the strategy sharded it, with its weights on the
            meta device; None if it was not sharded, or could not be copied.
    """

    inner: Module
    wrapped: Module
    training: bool
    meta_copy: Module | None = None

    @property
    def plain(self) -> Module:
        """The user's model without the wrapper of ``torch.compile``."""
        return of_torch.original_module(self.inner)


def tied_names(model: Module) -> list[list[str]]:
    """Return the names of tied weights: a list of names for each parameter that has several.

    The names of a group are in the order of the model's modules: ["embedding.weight",
    "head.weight"] if the embedding comes before the head. The first name counts as the owner.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def retie_parameters(model: Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Tie weights again that were loaded or moved one name at a time, in place.

    Each group of names gets one parameter: that of the first name which is not on the meta device.
    A group whose parameters are all on the meta device is left unchanged.
    """
    for group in tied_params:
        found = (model.get_parameter(name) for name in group)
        parameter = next((one for one in found if one.device.type != "meta"), None)
        for name in group if parameter is not None else ():
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, parameter)
