"""How one model is spread over the mesh, step by step, in the order that must be kept.

The order is torchtitan's (pipeline, tensor, activation checkpointing, compile, then data). Each
step works on what the one before has left:

1. weights on the meta device get memory and values, and all ranks start from the same ones. Where
   nothing but shards is asked for, this is done with each unit of step 6 as its turn comes: a
   device holds its shards and one whole unit, and need not have room for the model. Otherwise the
   whole model is made ready on the host;
2. pipeline: each rank keeps the blocks of its stages, so that all that follows sees those alone;
3. tensor: the layers of the plan are divided over the ranks that compute them together;
4. activation checkpointing: around whole blocks, so that it sees divided layers, not the reverse;
5. compile: the whole with the activation checkpointing of its blocks, or each block inside of its
   own; of a pipeline each block, since a stage ends a forward by an exception, which no graph can
   hold;
6. data: what is left is sharded over the ranks that read different samples, or different parts
   of their sequences (context), outermost. Of a pipeline, each block is sharded on its own: its
   stage ends in the middle of the model's forward. What is outside of the blocks stays whole;
   without shards, blocks stay whole, too. Gradients of what is whole are averaged over the
   replicas after the batch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from notebook_accel.private import of_torch
from notebook_accel.training import collectives
from notebook_accel.training.models import retie_parameters, tied_names
from notebook_accel.training.models.compiling import compile_in_place
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.strategies import dtensors, fsdp, tensor
from notebook_accel.training.strategies.spread_models import has_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from notebook_accel.training.models.compiling import TorchDynamoPlugin
    from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_accel.training.settings.parallelism import ParallelismConfig

__all__ = ["parallelize"]


def parallelize(
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
        model: the user's, whole on every rank, wherever it lies; or divided along "tp" already.
        mesh: the ranks; it has the dimensions of ``parallelism`` that are in use.
        parallelism: how many ranks each kind of parallelism has, and its settings.
        plugin: how weights are sharded.
        dynamo: how the model is compiled.
        dtype: the type that the model computes in; None for that of its weights.
        device: where this rank computes.
    """
    dimensions = mesh.mesh_dim_names or ()
    data = _data_dimensions(parallelism, dimensions)
    # Found now: the plugin names the modules to ignore, and names change once a stage has dropped
    # blocks.
    ignored = plugin.ignored_parts(model) if data else []
    make_ready: Callable[..., None] = partial(
        _make_ready, plugin=plugin, dtype=dtype if data else None, device=device
    )
    # Every rank decides alike, even if only some have read the weights: all broadcast in one order.
    # It may wait for step 6 where the steps between take weights as they are, and no weight is in
    # both a unit and an ignored module.
    if "pp" in dimensions or "tp" in dimensions or ignored:
        make_ready(model, home=torch.device("cpu"))
        make_ready = _leave
    own_blocks: list[Module] = []
    if "pp" in dimensions:
        # Imported here: torch's pipelines take seconds, for those who use them alone.
        from notebook_accel.training.strategies import stages

        own_blocks = stages.cut(model, mesh["pp"], parallelism, device)
    if "tp" in dimensions:
        tensor.divide_layers(model, mesh["tp"], parallelism.tp_plan)
    chosen = fsdp.choose_modules(model, plugin)
    if plugin.activation_checkpointing:
        fsdp.checkpoint_activations(chosen, plugin)
    compile_in_place(model, dynamo, own_blocks)
    if "cp" in dimensions:
        from notebook_accel.training.strategies import context

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
            make_ready=partial(make_ready, home=device),
        )
    move_what_is_whole(model, device)  # before a hook has noted where a weight lies
    if kept_whole and not own_blocks:  # a pipeline averages what is whole, after the batch
        # Not mesh["dp_cp"], by which torch warns.
        everyone = of_torch.flatten_mesh(mesh[tuple(parallelism.dp_cp_dim_names)], "dp_cp")
        fsdp.average_gradients(kept_whole, everyone.get_group())
    # The blocks of a pipeline's stage run forward for several micro-batches first.
    if data and not own_blocks and plugin.reshard_after_forward:
        fsdp.keep_root_for_backward(model)
    dtensors.accept_whole_weights(model)


def _make_ready(
    model: Module,
    *,
    home: torch.device,
    plugin: FullyShardedDataParallelPlugin,
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """Give a model, or a part of it, the weights that training begins with.

    Args:
        model: what is in parts already stays as it is.
        home: where empty weights get memory.
        plugin: how empty weights are filled, and whether ranks start alike.
        dtype: the type that sharded weights are gathered in; None for their own.
        device: where this rank computes.
    """
    fill_empty(model, home, plugin)
    if dtype is not None:
        keep_in_full_precision(model, dtype)
    if plugin.sync_module_states:
        start_alike(model, device)


def _leave(model: Module, *, home: torch.device) -> None:
    """Do nothing: the whole model was made ready before."""


def fill_empty(model: Module, device: torch.device, plugin: FullyShardedDataParallelPlugin) -> None:
    """Give weights on the meta device memory, and values by ``param_init_fn`` or their layer.

    Where all ranks then start from rank 0's weights (:func:`start_alike`), the values that others
    made are replaced.
    """

    ties = tied_names(model)
    empty = [part for part in model.modules() if _is_empty(part)]
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
    """Keep weights of 16 bits that train in float32, as Accelerate does under FSDP.

    They are gathered in ``dtype`` all the same. Stepped in 16 bits, most would stay where they are:
    a step that is smaller than 2**-9 of a weight in bfloat16 is rounded away.
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
    """Give every rank rank 0's weights and buffers, as DDP does; what is in parts stays.

    Args:
        model: on the host or on the device.
        device: where this rank computes, over which tensors travel one by one: its backend is the
            fastest.
    """
    with torch.no_grad():
        for values in (*model.parameters(), *model.buffers()):
            if not has_parts([values]):
                sent = values.data.to(device)
                collectives.broadcast(sent)
                values.data.copy_(sent)


def move_what_is_whole(model: Module, device: torch.device) -> None:
    """Put weights and buffers that are not in parts on the device where this rank computes."""
    for values in (*model.parameters(), *model.buffers()):
        if not has_parts([values]):
            values.data = values.data.to(device)


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
