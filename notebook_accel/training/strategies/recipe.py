"""The recipe: how one model is spread over the mesh, step by step, in the order that must be kept.

The order is torchtitan's (pipeline, tensor, activation checkpointing, compile, then data). Each
step works on what the one before has left:

1. weights on the meta device get memory and values, and all ranks start from the same ones;
2. pipeline: each rank keeps the blocks of its stages, so that all that follows sees those alone;
3. tensor: the layers of the plan are divided over the ranks that compute them together;
4. activation checkpointing: around whole blocks, so that it sees divided layers, not the reverse;
5. compile: forwards are compiled with their activation checkpointing inside; of a pipeline each
   block on its own, since a stage ends a forward by an exception, which no graph can hold;
6. data: what is left is sharded over the ranks that read different samples, or different parts
   of their sequences (context), outermost. Of a pipeline, each block is sharded on its own: its
   stage ends in the middle of the model's forward. What is outside of the blocks stays whole;
   without shards, blocks stay whole, too. Gradients of what is whole are averaged over the
   replicas after the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from notebook_accel.training import collectives
from notebook_accel.training.compiling import compile_in_place
from notebook_accel.training.strategies import dtensors, fsdp, tensor
from notebook_accel.training.ties import retie_parameters, tied_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from notebook_accel.training.compiling import TorchDynamoPlugin
    from notebook_accel.training.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_accel.training.parallelism import ParallelismConfig

__all__ = ["spread"]


def spread(
    model: Module,
    mesh: DeviceMesh,
    *,
    parallelism: ParallelismConfig,
    plugin: FullyShardedDataParallelPlugin,
    dynamo: TorchDynamoPlugin,
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """Spread a model over the mesh, in place.

    Args:
        model: the user's, whole on every rank.
        mesh: the ranks; it has the dimensions of ``parallelism`` that are in use.
        parallelism: how many ranks each kind of parallelism has, and its settings.
        plugin: how weights are sharded.
        dynamo: how the model is compiled.
        dtype: the type that the model computes in; None for that of its weights.
        device: where this rank computes.
    """
    dimensions = mesh.mesh_dim_names or ()
    data = _data_dimensions(parallelism, dimensions)
    # By their names, which are others once a stage has dropped blocks, or activation checkpointing
    # has wrapped them.
    ignored = plugin.ignored_parts(model) if data else []
    fill_empty(model, device, plugin)
    if plugin.sync_module_states:
        start_alike(model)
    own_blocks: list[Module] = []
    if "pp" in dimensions:
        # Imported here: torch's pipelines take seconds, for those who use them alone.
        from notebook_accel.training.strategies import stages

        own_blocks = stages.cut(model, mesh["pp"], parallelism, device)
    if "tp" in dimensions:
        tensor.divide_layers(model, mesh["tp"], parallelism.tp_plan)
    chosen = fsdp.choose_modules(model, plugin)
    if plugin.activation_checkpointing:
        chosen = fsdp.checkpoint_activations(model, chosen, plugin)
    compile_in_place(model, dynamo, own_blocks)
    if "cp" in dimensions:
        from notebook_accel.training.strategies import context

        context.fit_decoder(model)
    if data:
        kept_whole = {weight for part in ignored for weight in part.parameters()}
        # One dimension shards; of two, the first replicates what the second shards.
        for unit, inside in fsdp.units(model, chosen, own_blocks):
            fsdp.shard(
                unit,
                inside,
                mesh[data],
                plugin=plugin,
                dtype=dtype,
                device=device,
                ignored=kept_whole,
            )
        if kept_whole and not own_blocks:  # a pipeline averages what is whole, after the batch
            # Not mesh["dp_cp"], by which torch warns.
            everyone = mesh[tuple(parallelism.dp_cp_dim_names)]._flatten("dp_cp")
            fsdp.average_gradients(kept_whole, everyone.get_group())
        # The blocks of a pipeline's stage run forward for several micro-batches first.
        if not own_blocks and plugin.reshard_after_forward:
            fsdp.keep_root_for_backward(model)
    dtensors.accept_whole_weights(model)


def fill_empty(model: Module, device: torch.device, plugin: FullyShardedDataParallelPlugin) -> None:
    """Give weights on the meta device memory, and values by ``param_init_fn`` or their layer.

    Where all ranks then start from rank 0's weights (:func:`start_alike`), the values that others
    made are replaced.
    """
    ties = tied_names(model)
    for part in [part for part in model.modules() if _is_empty(part)]:
        part.to_empty(device=device, recurse=False)
        fill = plugin.param_init_fn or getattr(type(part), "reset_parameters", None)
        if fill is not None:
            fill(part)
    # Each name of a weight got memory of its own; the first one's is kept.
    retie_parameters(model, ties)


def start_alike(model: Module) -> None:
    """Give every rank rank 0's weights and buffers, as DDP does."""
    with torch.no_grad():
        for values in (*model.parameters(), *model.buffers()):
            collectives.broadcast(values.data)


def _is_empty(module: Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(values.is_meta for values in own)


def _data_dimensions(parallelism: ParallelismConfig, dimensions: Sequence[str]) -> tuple[str, ...]:
    """The dimensions of the mesh over which weights are replicated and sharded; none where all
    ranks of a stage keep its weights whole."""
    if parallelism.pp_enabled and not parallelism.dp_shard_enabled:
        return ()
    shards = [name for name in ("dp_shard", "cp") if name in dimensions]
    replicas = [name for name in ("dp_replicate",) if name in dimensions]
    # A weight is sharded over both as over one.
    return (*replicas, *(["dp_shard_cp"] if len(shards) > 1 else shards))
