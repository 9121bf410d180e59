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

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["copy_on_meta", "fill"]


def copy_on_meta(model: Module) -> Module | None:
    """A copy of a model whose weights take no memory; they lie on torch's meta device.

    Buffers and tensors among the attributes of a module are shared with the model; everything else
    is copied, so that what a module gets later is not the copy's.

    None where a weight is of another library's class, for which an empty tensor could not stand,
    and where the model's own classes cannot be copied.
    """
    if any(type(weight) is not Parameter for weight in model.parameters()):
        return None
    # What deepcopy finds here, by identity, it takes as the copy: tied names keep one weight.
    copies: dict[int, Any] = {
        id(value): value
        for part in model.modules()
        for value in (*vars(part).values(), *part.buffers(recurse=False))
        if isinstance(value, torch.Tensor)
    }
    for weight in model.parameters():
        empty = torch.empty_like(weight, device="meta")
        copies[id(weight)] = Parameter(empty, weight.requires_grad)
    try:
        return copy.deepcopy(model, copies)
    except Exception:  # whatever classes of the user's do: such a model is trained all the same
        return None


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
