"""The recipe: how one model is spread over the mesh, step by step, in the order that must be kept.

The order is torchtitan's (pipeline, tensor, activation checkpointing, compile, then data). Each
step works on what the one before has left:

1. all ranks start from the same weights;
2. pipeline: each rank keeps the blocks of its stages, so that all that follows sees those alone;
3. tensor: the layers of the plan are divided over the ranks that compute them together;
4. activation checkpointing: around whole blocks, so that it sees divided layers, not the reverse;
5. compile: the forwards of what is computed here, recomputing included; a pipeline's, block by
   block, since what goes from stage to stage is no graph;
6. data: what is left is sharded over the ranks that read different samples, or different parts
   of their sequences (context), outermost. Replicas of a pipeline shard nothing: they average
   gradients after the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from notebook_accel.training import collectives
from notebook_accel.training.compiling import compile_in_place
from notebook_accel.training.strategies import dtensors, fsdp, tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from notebook_accel.training.compiling import TorchDynamoPlugin
    from notebook_accel.training.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_accel.training.parallelism import ParallelismConfig

__all__ = ["SHARDS_AND_CONTEXT", "spread"]

# The name of the two dimensions of a mesh as one: a weight is sharded over both.
SHARDS_AND_CONTEXT = "dp_shard_cp"


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
    if plugin.sync_module_states:
        start_alike(model, device, plugin)
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
    data: list[str] = [name for name in ("dp_replicate", "dp_shard", "cp") if name in dimensions]
    if "cp" in dimensions:
        from notebook_accel.training.strategies import context

        context.fit_decoder(model)
        if "dp_shard" in dimensions:
            data[-2:] = [SHARDS_AND_CONTEXT]
    if data and "pp" not in dimensions:
        # One dimension shards; of two, the first replicates what the second shards.
        fsdp.shard(model, chosen, mesh[tuple(data)], plugin=plugin, dtype=dtype, device=device)
    dtensors.accept_whole_weights(model)


def start_alike(
    model: Module, device: torch.device, plugin: FullyShardedDataParallelPlugin
) -> None:
    """Give every rank rank 0's weights and buffers, as DDP does.

    A rank whose weights are on the meta device (rank 0 alone has read them) gets memory for them.
    """
    empty = [part for part in model.modules() if _is_empty(part)]
    for part in empty:
        part.to_empty(device=device, recurse=False)
        fill = plugin.param_init_fn or getattr(type(part), "reset_parameters", None)
        if fill is not None:
            fill(part)
    with torch.no_grad():
        for values in (*model.parameters(), *model.buffers()):
            collectives.broadcast(values.data)


def _is_empty(module: Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(values.is_meta for values in own)
