"""Sharding by torch's ``fully_shard`` (FSDP2): which modules, in which types, and where.

Each rank keeps a part of every weight. The modules that a policy chooses are gathered one at a
time, right before their forward and backward, so that never more than one of them is whole; what
is left belongs to the model itself and is gathered as one.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from notebook_accel.errors import ConfigError
from notebook_accel.training.models import ReplacedForward
from notebook_accel.training.strategies.dtensors import local_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module, Parameter

    from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin

__all__ = [
    "average_gradients",
    "checkpoint_activations",
    "choose_modules",
    "keep_root_for_backward",
    "shard",
    "units",
]


def choose_modules(model: Module, plugin: FullyShardedDataParallelPlugin) -> list[Module]:
    """Return the modules inside ``model`` that are gathered on their own, inner ones first.

    A module whose weight is tied to one outside is left to the model: ``fully_shard`` would give
    it new weights and leave the other name with the old one, without a word.
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
    """Append modules that the policy chooses; returns the size of all chosen weights inside."""
    size = sum(weight.numel() for weight in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=size):
        return 0
    covered = sum(_choose(child, policy, chosen) for child in module.children())
    if policy(module=module, recurse=False, nonwrapped_numel=size - covered):
        chosen.append(module)
        return size
    return covered


def _count_uses(module: Module) -> Counter[int]:
    """Return how many names each weight has in ``module``, by its id."""
    return Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))


def checkpoint_activations(
    chosen: Sequence[Module], plugin: FullyShardedDataParallelPlugin
) -> None:
    """Let the chosen modules compute their forward again in backward, in place.

    Torch's own wrapper would stand between a module and its parent, and change the names of all
    modules inside: PEFT, which looks its adapters up by them, would then save none.

    Raises:
        ConfigError: there is nothing between the model and its weights to choose.
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


class _CheckpointedForward(ReplacedForward):
    """A forward whose backward computes it again, rather than keep what it has computed."""

    def __init__(self, module: Module, *, offload: bool) -> None:
        super().__init__(module)
        self.offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Outside of the checkpoint: what it keeps, its inputs, goes to the host and nothing else.
        with save_on_cpu(pin_memory=True) if self.offload else nullcontext():
            return checkpoint(self.plain, *args, use_reentrant=False, **kwargs)


def units(
    model: Module, chosen: Sequence[Module], blocks: Sequence[Module]
) -> list[tuple[Module, list[Module]]]:
    """Return the modules to shard, each with the chosen modules inside of it.

    That is the model, or each block of a pipeline's stages.

    Args:
        model: the one that was prepared.
        chosen: the modules that are gathered on their own, inner ones first.
        blocks: those that this rank has; none where the model is no pipeline.
    """
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
    """Shard the chosen modules and then the model, in place.

    Args:
        model: whole on every rank, or in parts over another dimension of the mesh already.
        chosen: the modules that are gathered on their own, inner ones first.
        mesh: one dimension (shards), or two (replicas, shards).
        plugin: how weights are sharded.
        dtype: the type that the model computes in; None for that of its weights.
        device: where the ranks compute.
        ignored: weights that every rank keeps whole.
        make_ready: called with each module right before it is sharded, which puts it on the device.
    """
    inside = plugin.precision_policy(dtype)
    options = {
        "mesh": mesh,
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.offload_policy(device),
        "ignored_params": ignored or None,
    }
    for part in chosen:
        make_ready(part)
        # With an output type on an inner module the next one gets what its weights are not:
        # "mat1 and mat2 must have the same dtype".
        fully_shard(part, mp_policy=replace(inside, output_dtype=None), **options)
    make_ready(model)
    fully_shard(model, mp_policy=inside, **options)


def average_gradients(weights: Iterable[Parameter], group: dist.ProcessGroup) -> None:
    """Let the gradients of weights that every rank keeps whole be averaged in each backward.

    ``fully_shard`` leaves them to the user: each rank would step such a weight by its own samples.
    Within a window, the average of earlier batches is in each rank's gradient already: averaging
    it once more changes nothing.

    Args:
        weights: in each backward, all ranks of the group must use the same ones of them.
        group: the ranks that compute on other samples, or other parts of sequences.
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


def keep_root_for_backward(model: Module) -> None:
    """Let what is gathered with the model itself stay whole from forward to backward.

    Backward begins with it: it would be freed and gathered again at once. Torch does the same of
    its own accord, but after a forward without gradients too, so that ``parameters()`` would then
    give whole weights.
    """
    model.register_forward_pre_hook(_choose_what_forward_leaves)


def _choose_what_forward_leaves(model: Any, _: Any) -> None:
    model.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=False)
