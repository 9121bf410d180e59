"""Gradients that no step has used, of models in parts: how they are read, and put back.

``fully_shard`` adds up the gradients of an open window whole, where no attribute of the weights
shows them: in what it calls the unsharded parameter, or beside it in another type. That exists
once the model has had a forward, so what a checkpoint holds waits for the first backward after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    import torch
    from torch.nn import Module

__all__ = ["drop_unreduced", "local_part", "put_unreduced", "unreduced", "with_part"]


def unreduced(model: Module) -> dict[str, torch.Tensor]:
    """Whole gradients that the batches of an open window have added up, by names of weights."""
    found: dict[str, torch.Tensor] = {}
    for name, held in _fsdp_params(model):
        added: torch.Tensor | None = getattr(held, "unsharded_accumulated_grad", None)
        gradient = held._unsharded_param.grad if hasattr(held, "_unsharded_param") else None
        pending = gradient if added is None else added
        if pending is not None:
            found[name] = pending
    return found


def put_unreduced(model: Module, gradients: dict[str, torch.Tensor]) -> None:
    """Put back what :func:`unreduced` gave, and take it out of ``gradients``.

    What belongs to weights that have had no forward yet stays there.
    """
    for name, held in _fsdp_params(model):
        if name in gradients and hasattr(held, "_unsharded_param"):
            whole = held._unsharded_param
            gradient = gradients.pop(name).to(whole.device)
            if gradient.dtype == whole.dtype:
                whole.grad = gradient
            else:
                held.unsharded_accumulated_grad = gradient


def drop_unreduced(
    model: Module, weights: Container[int], waiting: dict[str, torch.Tensor] | None = None
) -> None:
    """Drop what :func:`unreduced` gives.

    Args:
        model: it keeps these gradients.
        weights: the ids of those weights, as an optimizer has them, whose gradients are dropped.
        waiting: gradients that :func:`put_unreduced` is to put back later; dropped too.
    """
    for name, held in _fsdp_params(model):
        if id(held.sharded_param) not in weights:
            continue
        held.unsharded_accumulated_grad = None
        if hasattr(held, "_unsharded_param"):
            held._unsharded_param.grad = None
        if waiting is not None:
            waiting.pop(name, None)


def local_part(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor in parts; a plain one as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def with_part(part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The tensor in parts like ``weight``, of which this rank's is ``part``."""
    if not isinstance(weight, DTensor):
        return part
    return DTensor.from_local(
        part.to(weight.device),
        weight.device_mesh,
        weight.placements,
        shape=weight.shape,
        stride=weight.stride(),
    )


def _fsdp_params(model: Module) -> Iterator[tuple[str, Any]]:
    """What ``fully_shard`` keeps for each weight, by the weight's name."""
    names = {id(part): name for name, part in model.named_modules()}
    for part in model.modules():
        if not isinstance(part, FSDPModule):
            continue
        state: Any = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            for held in group.fsdp_params if group is not None else ():
                owner, own_name = held._module_info.module, held._module_info.param_name
                yield f"{names[id(owner)]}.{own_name}".lstrip("."), held
