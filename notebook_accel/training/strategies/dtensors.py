"""Helpers for sharded tensors (``DTensor``): sharding and joining, optimizers, gradient norms.

A strategy that shards a model replaces its weights by ``DTensor`` parameters. An optimizer that was
made before still holds the old weights: :func:`remap` gives it the new ones. Checkpoints hold full
tensors: other functions join shards to full tensors, and shard full tensors on loading.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.private import of_torch
from notebook_accel.training.collectives.nested import recursively_apply
from notebook_accel.training.models import joined_state_dict, weights_of


def make_whole(values: Any, *, keeps: bool = True, to_cpu: bool = False) -> Any:
    """Return ``values`` with full tensors, empty ones where not ``keeps``; all ranks call it."""

    def join(part: Any) -> torch.Tensor:
        whole: torch.Tensor = part.detach().full_tensor()
        if not keeps:
            return torch.empty(0)
        return whole.cpu() if to_cpu else whole

    return recursively_apply(join, values, test_type=lambda value: isinstance(value, DTensor))


def whole_state_dict(model: Module, *, keeps: bool = True, to_cpu: bool = False) -> dict[str, Any]:
    """Return a state dict of full tensors, empty where not ``keeps``; all ranks call it."""

    def join(_: str, value: Any) -> Any:
        made = make_whole(value, keeps=keeps, to_cpu=to_cpu)
        return made.detach() if torch.is_tensor(made) else made

    return joined_state_dict(model, join, keeps=keeps)


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a full state dict into an optimizer of sharded weights; all ranks call it."""
    weights = [*weights_of(optimizer)]
    own = {index: with_parts(values, weights[index]) for index, values in state["state"].items()}
    optimizer.load_state_dict({**state, "state": own})
    turn_off_foreach_where_mixed(optimizer)


def total_grad_norm(
    weights: Iterable[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return the norm of the full gradients over all meshes, a plain tensor; all ranks call it."""
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


def like(whole: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Shard a full tensor like ``target`` if that is a ``DTensor``; all ranks call it."""
    if not isinstance(target, DTensor) or isinstance(whole, DTensor):
        return whole
    local = whole.detach().to(target.device)
    return distribute_tensor(local, target.device_mesh, target.placements)


def accept_whole_weights(model: Module) -> None:
    """Add hooks so that ``load_state_dict`` of a sharded model accepts full tensors."""
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


def remap(optimizer: Optimizer, replaced: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Put new weights for old into an optimizer, and keep their state, if they have elements."""
    for group in optimizer.param_groups:
        old = list(group["params"])
        new = [replaced.get(weight, weight) for weight in old]
        # In place: an optimizer may hold the list itself (LBFGS does).
        group["params"][:] = new
        for before, after in zip(old, new, strict=True):
            if after is before or before not in optimizer.state:
                continue
            state = optimizer.state.pop(before)
            if after.numel():
                optimizer.state[after] = with_parts(state, after)
    turn_off_foreach_where_mixed(optimizer)


def with_parts(state: Mapping[str, Any], weight: torch.Tensor) -> dict[str, Any]:
    """Return one weight's state, entries of its shape sharded like it; all ranks call it."""
    return {
        name: like(value, weight)
        if isinstance(value, torch.Tensor) and value.shape == weight.shape and value.ndim
        else value
        for name, value in state.items()
    }


def turn_off_foreach_where_mixed(optimizer: Optimizer) -> None:
    """Set ``foreach=False`` in an optimizer whose weights lie on several meshes.

    Torch's ``foreach`` operations raise "got mixed torch.Tensor and DTensor" for tensors on
    different meshes, or for plain and sharded tensors together. Tensor parallelism leads to this:
    layers in its plan are divided over one mesh dimension more than the other layers. A user's own
    ``foreach=True`` is not changed.
    """
    # A weight of another stage, without elements, has no gradient to step with.
    if len(by_mesh(weight for weight in weights_of(optimizer) if weight.numel())) > 1:
        for group in optimizer.param_groups:
            # None leaves the choice to torch, which may take the fused loop; True is the user's
            # own word, and torch says why it cannot be.
            if "foreach" in group and not group["foreach"]:
                group["foreach"] = False


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by their device mesh, since torch's operations accept only one mesh."""
    found: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        key = tensor.device_mesh if isinstance(tensor, DTensor) else None
        found.setdefault(key, []).append(tensor)
    return list(found.values())


def drop_unreduced(models: Iterable[Module], weights: Container[int]) -> None:
    """Drop gradients that ``fully_shard`` keeps where ``zero_grad()`` cannot see them."""
    for part in (part for model in models for part in model.modules()):
        if isinstance(part, FSDPModule):
            of_torch.drop_whole_gradients(part, weights)
