"""A model without its weights, as it was before a strategy spread it over the ranks.

rank:      prepare --> copy_on_meta(model), then the model is cut, divided or sharded in place
rescue:    the meta copy travels to the notebook, and so do the pieces of its weights
notebook:  fill(meta_copy, whole weights) --> the model as the user made it
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter

from notebook_accel.training.models import ReplacedForward

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["copy_on_meta", "fill"]


def copy_on_meta(model: Module) -> Module | None:
    """A copy of a model whose weights take no memory; they lie on torch's meta device.

    Everything else is shared with the model. The dictionaries that torch keeps in each module are
    copied: weights, buffers, children and hooks that a module gets later are not the copy's.

    None where a weight is of another library's class, for which an empty tensor could not stand,
    and where the model's own classes cannot be copied.
    """
    if any(type(weight) is not Parameter for weight in model.parameters()):
        return None
    try:
        return _copied(model)
    except Exception:  # whatever classes of the user's do: such a model is trained all the same
        return None


def _copied(model: Module) -> Module:
    noted_by_torch = vars(Module()).keys()
    copies = {id(part): object.__new__(type(part)) for part in model.modules()}
    # By identity: tied names have one weight in the copy, too.
    empty = {
        id(weight): Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
        for weight in model.parameters()
    }
    for part in model.modules():
        own = vars(copies[id(part)])
        own.update(
            (name, copy.copy(value) if name in noted_by_torch else value)
            for name, value in vars(part).items()
        )
        for name in noted_by_torch:
            if isinstance(own.get(name), dict):
                _replace(own[name], {**copies, **empty})
        if isinstance(own.get("forward"), ReplacedForward):
            own["forward"] = own["forward"].moved_to(copies[id(part)])
    return copies[id(model)]


def _replace(by_name: dict[str, Any], new: Mapping[int, Any]) -> None:
    by_name.update({name: new.get(id(old), old) for name, old in by_name.items()})


def fill(meta_copy: Module, weights: Mapping[str, Any]) -> None:
    """Give a meta copy whole weights, whose memory it shares from then on, and whole buffers.

    Raises:
        Exception: the weights are not those of the model, or its classes do not take them.
    """
    made: dict[int, Parameter] = {}
    for name, empty in [*meta_copy.named_parameters(remove_duplicate=False)]:
        if id(empty) not in made:
            made[id(empty)] = Parameter(weights[name], empty.requires_grad)
        owner, _, last = name.rpartition(".")
        setattr(meta_copy.get_submodule(owner), last, made[id(empty)])
    # Buffers, and what modules keep beside their tensors; a weight is copied onto itself.
    meta_copy.load_state_dict(weights)
