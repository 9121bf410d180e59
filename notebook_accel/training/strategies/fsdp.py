"""Sharding by torch's ``fully_shard`` (FSDP2).

Each rank keeps a part of every weight. The plugin's ``auto_wrap_policy`` chooses modules whose
weights are gathered one module at a time, right before their forward and backward, so that few full
weights are in memory at once. The remaining weights belong to the model itself, and are gathered
together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.utils.checkpoint import checkpoint

from notebook_accel.errors import ConfigError
from notebook_accel.training.models import ReplacedForward
from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.strategies.dtensors import local_part


def choose_modules(model: Module, plugin: FullyShardedDataParallelPlugin) -> list[Module]:
    """Return the modules that ``fully_shard`` gathers one at a time, inner ones first.

    The plugin's ``auto_wrap_policy`` chooses them. A module with a weight that is tied to a module
    outside is left out, and its weights are gathered with the model: ``fully_shard`` would replace
    the weight inside, and silently leave the old one outside.
    """
    policy = plugin.wrap_policy(model)
    if policy is None:
        return []
    chosen: list[Module] = []
    _choose(model, policy, chosen)
    uses = _count_uses(model)
    return [
        part
        for part in chosen
        if part is not model
        # Containers have no forward of their own, before which they could be gathered.
        and not isinstance(part, (torch.nn.ModuleList, torch.nn.ModuleDict))
        and all(uses[weight] == count for weight, count in _count_uses(part).items())
    ]


def _choose(module: Module, policy: Callable[..., bool], chosen: list[Module]) -> int:
    size = sum(weight.numel() for weight in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=size):
        return 0
    covered = sum(_choose(child, policy, chosen) for child in module.children())
    if policy(module=module, recurse=False, nonwrapped_numel=size - covered):
        chosen.append(module)
        return size
    return covered


def _count_uses(module: Module) -> Counter[int]:
    """Return each weight's number of names in ``module`` (2 or more if tied), by its ``id``."""
    return Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))


def checkpoint_activations(
    chosen: Sequence[Module], plugin: FullyShardedDataParallelPlugin
) -> None:
    """Turn on activation checkpointing for the chosen modules, in place.

    Backward then computes their forwards again, so that activations take less memory. Each module's
    forward is replaced, rather than the module wrapped by torch's ``CheckpointWrapper``: a wrapper
    would change the names of the modules inside, by which PEFT looks up its adapters.
    """
    if not chosen:
        raise ConfigError(
            "activation_checkpointing=True is for the modules that auto_wrap_policy chooses, and "
            'it chose none: set auto_wrap_policy="transformer_based_wrap" with '
            'transformer_cls_names_to_wrap, or "size_based_wrap" with min_num_params'
        )
    for part in chosen:
        offload = bool(plugin.activation_checkpointing_offload)
        part.__dict__["forward"] = _CheckpointedForward(part, offload=offload)


@dataclass(eq=False, repr=False)
class _CheckpointedForward(ReplacedForward):
    """A forward whose backward computes it again; with ``offload``, inputs wait on the CPU."""

    offload: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Outside of the checkpoint: what it keeps, its inputs, goes to the host and nothing else.
        with save_on_cpu(pin_memory=True) if self.offload else nullcontext():
            return checkpoint(self.plain, *args, use_reentrant=False, **kwargs)


def units(
    model: Module, chosen: Sequence[Module], blocks: Sequence[Module]
) -> list[tuple[Module, list[Module]]]:
    """Return pairs: a module to shard (model or pipeline's block), and those chosen inside."""
    if not blocks:
        return [(model, list(chosen))]
    uses = _count_uses(model)
    found = []
    for block in blocks:
        if all(uses[weight] == count for weight, count in _count_uses(block).items()):
            inside = {id(part) for part in block.modules()} - {id(block)}
            found.append((block, [part for part in chosen if id(part) in inside]))
    return found


def shard(
    model: Module,
    chosen: Sequence[Module],
    mesh: DeviceMesh,
    *,
    plugin: FullyShardedDataParallelPlugin,
    dtype: torch.dtype | None,
    device: torch.device,
    ignored: set[Parameter],
    make_ready: Callable[[Module], None],
) -> None:
    """Shard the chosen modules and then the model by ``fully_shard``, in place; all ranks call it.

    Args:
        model: the model. Every rank has its full weights, or their part over another dimension of
            the mesh (tensor parallelism).
        mesh: a mesh of one dimension (shards), or of two (replicas, shards).
        dtype: the type that the model computes in; None for the type of its weights.
    """
    inside = plugin.precision_policy(dtype)
    options = {
        "mesh": mesh,
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.offload_policy(device),
        "ignored_params": ignored or None,
    }
    # With an output type on an inner module the next one gets what its weights are not:
    # "mat1 and mat2 must have the same dtype".
    for part, policy in (
        *((one, replace(inside, output_dtype=None)) for one in chosen),
        (model, inside),
    ):
        make_ready(part)
        whole = {weight for weight in part.parameters() if weight.requires_grad}
        fully_shard(part, mp_policy=policy, **options)
        _empty(whole.difference(part.parameters()))
        del whole


def _empty(weights: Iterable[torch.Tensor]) -> None:
    """Free the memory of weights that shards have replaced, of which an optimizer may hold some.

    Else each rank's device would hold the whole model until the last module is sharded. Frozen ones
    are left to whoever holds them: another model may use them too.
    """
    for weight in weights:
        if not isinstance(weight, DTensor):
            weight.data = weight.data.new_empty(0)


def average_gradients(weights: Iterable[Parameter], group: dist.ProcessGroup) -> None:
    """Add hooks that average the gradients of unsharded weights over the ranks in each backward.

    ``fully_shard`` does not touch weights that it ignores: without the hooks, each rank would
    update them by the gradients of its own samples. With gradient accumulation, each backward
    averages the earlier sum again, which is harmless: that sum is equal on all ranks already.
    """
    size = dist.get_world_size(group)

    def average(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        own = local_part(weight.grad)
        total = own.contiguous()
        dist.all_reduce(total, group=group)
        own.copy_(total / size)

    for weight in weights:
        # One that is frozen now may be thawed later, and torch takes no hook for it as it is.
        trains = weight.requires_grad
        if weight.is_floating_point() or weight.is_complex():
            weight.requires_grad_(True)
            weight.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]
            weight.requires_grad_(trains)


def keep_root_for_backward(model: Any, _: Any) -> None:
    """Keep the root module's weights gathered after a forward with gradients; else free them.

    The root module's weights are those that no chosen module inside the model has. Backward begins
    with them, so freeing them would mean gathering them again at once. By default, torch keeps them
    also after a forward without gradients, and ``parameters()`` would then return full weights.
    """
    model.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=False)
