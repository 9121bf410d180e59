"""Copies of a model without weights, from before the model was sharded over the ranks.

When a run is stopped, the notebook gets the trained model back as the user made it. A sharded model
cannot be sent as it is, so a copy on torch's meta device is made before sharding::

    rank:      prepare --> copy_on_meta(model), then the model is sharded in place
    stop:      rank 0 sends the meta copy to the notebook, all ranks their pieces of the weights
    notebook:  fill(meta_copy, joined weights) --> the model, unsharded
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Module, Parameter


def copy_on_meta(model: Module) -> Module | None:
    """Return a deep copy of a model whose weights are on the meta device and take no memory.

    Buffers, and tensors that are plain attributes of a module, are shared with the model. All else
    is copied, so that later changes of the model, such as hooks, do not reach the copy.

    Returns:
        The copy. None if a weight is not a plain ``torch.nn.Parameter`` (as in quantized models),
        or if deep copying the model fails; training goes on without a copy.
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
    """Fill a copy of :func:`copy_on_meta` with unsharded weights and buffers, in place.

    Raises:
        Exception: names or shapes of the weights do not match, or user code in the model raised.
    """
    made: dict[int, Parameter] = {}
    for name, empty in [*meta_copy.named_parameters(remove_duplicate=False)]:
        if id(empty) not in made:
            made[id(empty)] = Parameter(weights[name], empty.requires_grad)
        owner, _, last = name.rpartition(".")
        setattr(meta_copy.get_submodule(owner), last, made[id(empty)])
    # Buffers, and what modules keep beside their tensors; a weight is copied onto itself.
    meta_copy.load_state_dict(weights)
