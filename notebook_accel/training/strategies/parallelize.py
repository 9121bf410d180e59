"""Spreads one model over the device mesh, in steps whose order matters.

The order is torchtitan's (pipeline, tensor, activation checkpointing, compile, then data):

1. Initialize: weights on the meta device get memory and values, and all ranks get rank 0's weights.
   With sharding alone, this is done module by module within step 6, so that a device never needs
   memory for the full model. In a pipeline, with tensor parallelism or with modules that sharding
   ignores, the full model is initialized on the CPU.
2. Pipeline: each rank keeps the blocks of its stages. Later steps see these alone.
3. Tensor parallelism: the layers named by the plan are divided over the ranks of the mesh
   dimension "tp".
4. Activation checkpointing: around blocks, so that it contains the divided layers.
5. Compile: the whole model, including its activation checkpointing. If the user asked for
   ``use_regional_compilation``, each repeated block is compiled instead, inside of its activation
   checkpointing. In a pipeline, always each block: a stage ends the model's forward by an
   exception, which a compiled graph cannot contain.
6. Data: weights are sharded over the ranks that read different samples, or (context parallelism)
   different parts of sequences.

   - Without a pipeline, the whole model is sharded, except modules that the plugin ignores. The
     gradients of these modules are averaged by hooks in each backward.
   - In a pipeline, each block is sharded on its own, since a stage ends in the middle of the
     model's forward. Weights outside of the blocks stay whole, as does a block that shares a weight
     with another module; without ``dp_shard_size`` all weights stay whole. The gradients of whole
     weights are averaged once, after the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter

from notebook_accel.private import of_torch
from notebook_accel.training import collectives
from notebook_accel.training.models import has_parts, retie_parameters, tied_names
from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.settings.parallelism import ParallelismConfig
from notebook_accel.training.strategies import context, dtensors, fsdp, stages, tensor
from notebook_accel.training.strategies.compiling import compile_in_place
from notebook_accel.training.strategies.strategy_request import Request


def parallelize(
    model: Module,
    mesh: DeviceMesh,
    parallelism: ParallelismConfig,
    plugin: FullyShardedDataParallelPlugin,
    request: Request,
) -> None:
    """Shard and divide a model over the mesh, in place; all ranks call it.

    Args:
        model: the user's model. Every rank has it in full, on any device, or divided over the mesh
            dimension "tp" already.
        mesh: all ranks, with the dimensions of ``parallelism`` that are larger than 1.
        request: its precision has the type that the model computes in, its topology the device.
    """
    device, dtype = request.topology.device, request.precision.dtype
    dimensions = mesh.mesh_dim_names or ()
    data = _data_dimensions(parallelism, dimensions)
    # Found now: the plugin names the modules to ignore, and names change once a stage has dropped
    # blocks.
    ignored = plugin.ignored_parts(model) if data else []
    make_ready = partial(_make_ready, plugin=plugin, dtype=dtype if data else None, device=device)
    # Every rank decides alike, even if only some have read the weights: all broadcast in one order.
    # It may wait for step 6 where the steps between take weights as they are, and no weight is in
    # both a unit and an ignored module.
    is_ready = "pp" in dimensions or "tp" in dimensions or bool(ignored)
    if is_ready:
        make_ready(model, home=torch.device("cpu"))
    own_blocks: list[Module] = []
    if "pp" in dimensions:
        own_blocks = stages.cut(model, mesh["pp"], parallelism, device)
    if "tp" in dimensions:
        tensor.divide_layers(model, mesh["tp"], parallelism.tp_plan)
    chosen = fsdp.choose_modules(model, plugin)
    if plugin.activation_checkpointing:
        fsdp.checkpoint_activations(chosen, plugin)
    compile_in_place(model, request.dynamo, own_blocks)
    if "cp" in dimensions:
        context.fit_decoder(model)
    kept_whole = {weight for part in ignored for weight in part.parameters()}
    # One dimension shards; of two, the first replicates what the second shards.
    for unit, inside in fsdp.units(model, chosen, own_blocks) if data else ():
        fsdp.shard(
            unit,
            inside,
            mesh[data],
            plugin=plugin,
            dtype=dtype,
            device=device,
            ignored=kept_whole,
            make_ready=(lambda _: None) if is_ready else make_ready,
        )
    move_what_is_whole(model, device)  # before a hook has noted where a weight lies
    if kept_whole and not own_blocks:  # a pipeline averages what is whole, after the batch
        # Not mesh["dp_cp"], by which torch warns.
        everyone = of_torch.flatten_mesh(mesh[tuple(parallelism.dp_cp_dim_names)], "dp_cp")
        fsdp.average_gradients(kept_whole, everyone.get_group())
    # The blocks of a pipeline's stage run forward for several micro-batches first.
    if data and not own_blocks and plugin.reshard_after_forward:
        model.register_forward_pre_hook(fsdp.keep_root_for_backward)
    dtensors.accept_whole_weights(model)


def _make_ready(
    model: Module,
    plugin: FullyShardedDataParallelPlugin,
    dtype: torch.dtype | None,
    device: torch.device,
    home: torch.device | None = None,
) -> None:
    """Initialize a module's weights before it is sharded; all ranks call it."""
    fill_empty(model, home or device, plugin)
    if dtype is not None:
        keep_in_full_precision(model, dtype)
    if plugin.sync_module_states:
        start_alike(model, device)


def fill_empty(model: Module, device: torch.device, plugin: FullyShardedDataParallelPlugin) -> None:
    """Allocate weights and buffers that are on the meta device on ``device``; initialize them.

    The plugin's ``param_init_fn`` initializes a module, else its own ``reset_parameters``; with
    neither, the values are arbitrary. Each rank draws its own random values;
    :func:`start_alike` may replace them by rank 0's afterwards.
    """

    ties = tied_names(model)
    empty = [
        part
        for part in model.modules()
        if any(one.is_meta for one in (*part.parameters(False), *part.buffers(False)))
    ]
    for part in empty:
        # Beside empty weights a module may have buffers that were read.
        for name, weight in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
            if weight.is_meta:
                memory = torch.empty_like(weight, device=device)
                setattr(part, name, Parameter(memory, weight.requires_grad))
        for name, buffer in [*part.named_buffers(recurse=False, remove_duplicate=False)]:
            if buffer.is_meta:
                setattr(part, name, torch.empty_like(buffer, device=device))
        fill = plugin.param_init_fn or getattr(type(part), "reset_parameters", None)
        if fill is not None:
            fill(part)
    if empty:
        # Each name of a weight got memory of its own; the first one's is kept.
        retie_parameters(model, ties)


def keep_in_full_precision(model: Module, dtype: torch.dtype) -> None:
    """Convert trainable 16-bit weights to float32, in place, as Accelerate does under FSDP.

    The optimizer then steps float32 weights, while forward and backward use ``dtype``. In bfloat16
    most steps would have no effect: a change smaller than 2**-9 of a weight is rounded away.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    found = [weight for weight in trained if weight.dtype.itemsize == 2]
    for weight in found:
        weight.data = weight.data.float()
    if found:
        notice_once(
            "weights in full precision",
            "weights of 16 bits that train are kept and stepped in float32, as mixed precision "
            f"under FSDP means, and computed with in {str(dtype).removeprefix('torch.')}: "
            'checkpoints hold float32; mixed_precision="no" steps them as they are',
        )


def start_alike(model: Module, device: torch.device) -> None:
    """Broadcast rank 0's unsharded weights and buffers, as DDP does; all ranks call it."""
    with torch.no_grad():
        for values in (*model.parameters(), *model.buffers()):
            if not has_parts([values]):
                sent = values.data.to(device)
                collectives.broadcast(sent)
                values.data.copy_(sent)


def move_what_is_whole(model: Module, device: torch.device) -> None:
    """Move unsharded weights and buffers to the device of this rank, in place."""
    for values in (*model.parameters(), *model.buffers()):
        if not has_parts([values]):
            values.data = values.data.to(device)


def _data_dimensions(parallelism: ParallelismConfig, dimensions: Sequence[str]) -> tuple[str, ...]:
    """Return the mesh dimensions of replicas and shards; empty if ``fully_shard`` is not used."""
    if parallelism.pp_enabled and not parallelism.dp_shard_enabled:
        return ()
    shards = [name for name in ("dp_shard", "cp") if name in dimensions]
    replicas = [name for name in ("dp_replicate",) if name in dimensions]
    # A weight is sharded over both as over one.
    return (*replicas, *(["dp_shard_cp"] if len(shards) > 1 else shards))
