"""Tensors in parts: from whole to parts and back, and optimizers that follow their weights.

A strategy that spreads a model replaces its weights by ``DTensor`` parameters: each rank has its
part, and the mesh and placements say of what. An optimizer that was made before still holds the
old weights, and a plain state dict holds whole tensors: what is here brings them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from notebook_accel.private import of_torch
from notebook_accel.training.collectives import reduce
from notebook_accel.training.collectives.nested import recursively_apply
from notebook_accel.training.precision.loss_scaling import LossScaling

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from torch.nn import Module
    from torch.optim import Optimizer

__all__ = [
    "AgreeingScaler",
    "AgreeingScaling",
    "accept_whole_weights",
    "by_mesh",
    "clip_grad_norm",
    "drop_unreduced",
    "like",
    "load_optimizer_state",
    "local_part",
    "make_whole",
    "remap",
    "scale_grads",
    "turn_off_foreach_where_mixed",
    "unscale_in_parts",
    "total_grad_norm",
    "whole_state_dict",
    "with_parts",
]


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor in parts; a plain tensor unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def make_whole(values: Any, *, keeps: bool = True, to_cpu: bool = False) -> Any:
    """Return ``values`` with whole tensors in place of parts; all ranks call it.

    With ``keeps=False`` this rank takes part, and gets an empty tensor instead.
    """

    def join(part: Any) -> torch.Tensor:
        whole: torch.Tensor = part.detach().full_tensor()
        if not keeps:
            return torch.empty(0)
        return whole.cpu() if to_cpu else whole

    return recursively_apply(join, values, test_type=lambda value: isinstance(value, DTensor))


def whole_state_dict(model: Module, *, keeps: bool = True, to_cpu: bool = False) -> dict[str, Any]:
    """Return the whole weights and buffers of a model in parts; all ranks call it.

    Args:
        model: without wrapper.
        keeps: whether this rank gets them, or takes part and gets an empty dictionary.
        to_cpu: whether they are put on the host, one by one: a device may have no room for all.
    """
    joined: dict[int, Any] = {}  # by identity: tied names share their whole weight, too
    whole: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in joined:
            # One after the other, so that whole weights lie side by side only where they are
            # kept; and all ranks join the same ones, whether they keep them or not.
            made = make_whole(value, keeps=keeps, to_cpu=to_cpu)
            made = made.detach() if torch.is_tensor(made) else made
            joined[id(value)] = made if keeps else None
        if keeps:
            whole[name] = joined[id(value)]
    return whole


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a whole state into an optimizer of weights in parts."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    own = {index: with_parts(values, weights[index]) for index, values in state["state"].items()}
    optimizer.load_state_dict({**state, "state": own})
    turn_off_foreach_where_mixed(optimizer)


def clip_grad_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Clip the gradients of weights in parts, on whatever meshes, to a norm over all of them.

    Returns:
        the norm before clipping, a plain tensor; 0 on ``device`` where there is no gradient.
    """
    weights = [weight for weight in parameters if weight.grad is not None]
    total = total_grad_norm(weights, norm_type, device)
    scale_grads(weights, max_norm, total)
    return total


def total_grad_norm(
    weights: Iterable[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return the norm of the gradients of weights on any meshes; all ranks of these call it."""
    # The norm of norms is the norm of all, for every p; one group can be taken together. Weights
    # in parts may be offloaded to the host while those that are kept whole are not.
    norms = [
        make_whole(
            torch.nn.utils.get_total_norm([weight.grad for weight in group], norm_type)  # type: ignore[misc]
        ).to(device)
        for group in by_mesh(weights)
    ]
    if not norms:
        return torch.zeros((), device=device)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def scale_grads(weights: Iterable[torch.Tensor], max_norm: float, total: torch.Tensor) -> None:
    """Scale the gradients so that their norm, which is ``total`` now, is ``max_norm`` at most."""
    for group in by_mesh(weights):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)


def like(whole: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return ``whole``, which every rank has, divided like ``target`` if that is in parts."""
    if not isinstance(target, DTensor) or isinstance(whole, DTensor):
        return whole
    local = whole.detach().to(target.device)
    return distribute_tensor(local, target.device_mesh, target.placements)


def accept_whole_weights(model: Module) -> None:
    """Let plain ``load_state_dict`` of the model and its parts take whole tensors."""
    for part in model.modules():
        if any(isinstance(weight, DTensor) for weight in part.parameters(recurse=False)):
            part.register_load_state_dict_pre_hook(_divide_weights)  # type: ignore[no-untyped-call]


def _divide_weights(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    # Runs after torch's own hook of fully_shard, which has put the parts back in place of
    # weights that were gathered; those would look plain here.
    for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
        given = state.get(prefix + name)
        if not isinstance(weight, DTensor) or not isinstance(given, torch.Tensor):
            continue
        if given.shape == weight.shape:  # torch names the weight whose shape is another
            state[prefix + name] = like(given, weight)


def remap(optimizer: Optimizer, replaced: Mapping[torch.Tensor, torch.Tensor | None]) -> None:
    """Let the optimizer step the new weights, with the state that it had for the old ones.

    Args:
        optimizer: made before its weights were replaced, or after.
        replaced: the new weight of each old one; None for one that this rank no longer has.
    """
    for group in optimizer.param_groups:
        old = list(group["params"])
        new = [replaced.get(weight, weight) for weight in old]
        # In place: an optimizer may hold the list itself (LBFGS does).
        group["params"][:] = [weight for weight in new if weight is not None]
        for before, after in zip(old, new, strict=True):
            if after is before or before not in optimizer.state:
                continue
            state = optimizer.state.pop(before)
            if after is not None:
                optimizer.state[after] = with_parts(state, after)
    turn_off_foreach_where_mixed(optimizer)


def with_parts(state: Mapping[str, Any], weight: torch.Tensor) -> dict[str, Any]:
    """Return one weight's optimizer state with tensors of its shape divided like the weight."""
    return {
        name: like(value, weight)
        if isinstance(value, torch.Tensor) and value.shape == weight.shape and value.ndim
        else value
        for name, value in state.items()
    }


def turn_off_foreach_where_mixed(optimizer: Optimizer) -> None:
    """Turn off torch's fused loops over all weights where the weights lie on several meshes.

    One such loop cannot take tensors of several meshes, or plain ones and ones in parts together:
    "got mixed torch.Tensor and DTensor". That is so with tensor parallelism, where the layers of
    the plan have a dimension more than the others.
    """
    if len(by_mesh(weight for group in optimizer.param_groups for weight in group["params"])) > 1:
        for group in optimizer.param_groups:
            # None leaves the choice to torch, which may take the fused loop; True is the user's
            # own word, and torch says why it cannot be.
            if "foreach" in group and not group["foreach"]:
                group["foreach"] = False


class AgreeingScaler(torch.amp.GradScaler):
    """A loss scaler for gradients in parts: an overflow on one rank is one for all.

    Torch's own unscales all gradients in one operation, which refuses plain ones beside ones in
    parts, and agrees on overflows over the mesh of one gradient alone: replicas of the shard that
    overflowed would step. A rank without gradients of this optimizer (a stage of a pipeline whose
    weights are frozen) takes part: the others wait for it, and its scale must be theirs.
    """


class _OwnGradients:
    """Stands in for an optimizer in torch's scaler: tensors with this rank's gradients."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": weights}]


def unscale_in_parts(
    as_torch: Callable[[Any, bool], Mapping[torch.device, torch.Tensor]],
    optimizer: Optimizer,
    found_inf: torch.Tensor,
) -> dict[torch.device, torch.Tensor]:
    """Unscale gradients, in parts and plain ones together; all ranks call it.

    Args:
        as_torch: unscales the gradients of an optimizer, those of 16 bits if the flag says so.
        optimizer: whose gradients.
        found_inf: on the scaler's device.

    Returns:
        what torch's scaler wants: by device, 1 where a rank has found an overflow, and else 0.
    """
    own = []
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                grad = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
                own.append(grad.detach())
                own[-1].grad = grad
    for seen in as_torch(_OwnGradients(own), True).values():
        found_inf = torch.maximum(found_inf, seen.to(found_inf.device))
    return {found_inf.device: reduce(found_inf, "max")}


of_torch.unscale_by(AgreeingScaler, unscale_in_parts)


class AgreeingScaling(LossScaling):
    """Loss scaling in which all ranks skip a step if one does, whatever weights each has."""

    kind_of_scaler = AgreeingScaler

    def is_so_anywhere(self, is_so: bool) -> bool:
        return bool(reduce(torch.tensor(is_so), "max"))


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors in one list for each device mesh: operations take one mesh only."""
    found: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        key = tensor.device_mesh if isinstance(tensor, DTensor) else None
        found.setdefault(key, []).append(tensor)
    return list(found.values())


def drop_unreduced(model: Module, weights: Container[int]) -> None:
    """Drop the whole gradients that the batches of an open window have added up.

    ``fully_shard`` keeps them where no attribute of the weights shows them: in what it calls the
    unsharded parameter, or beside it in another type.

    Args:
        model: it keeps these gradients.
        weights: the ids of the weights, as an optimizer has them, that are meant.
    """
    for part in model.modules():
        if not isinstance(part, FSDPModule):
            continue
        for held in of_torch.fsdp_parameters(part):
            if id(held.sharded_param) in weights:
                held.unsharded_accumulated_grad = None
                whole = of_torch.whole_gradient(held)
                if whole is not None:
                    whole.grad = None
