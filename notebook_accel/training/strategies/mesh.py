"""Parallelism over a device mesh: sharding, replicas and tensor parallelism, combined.

The ranks form a mesh. Its last dimension holds neighbouring ranks, which share a machine: it is for
tensor parallelism, which communicates most::

    ParallelismConfig(dp_shard_size=2, tp_size=2)      dp_shard
                                                    0: [ rank 0, rank 1 ]   tp ->
                                                    1: [ rank 2, rank 3 ]

Ranks of one column read different samples and hold different shards. Ranks of one row read the same
samples and compute parts of the same layers.

A model is spread over the mesh in steps whose order matters (``_spread_model``). It is
torchtitan's: pipeline, tensor, activation checkpointing, compile, then data.

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

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from notebook_accel.errors import ConfigError
from notebook_accel.private import of_torch
from notebook_accel.rank.this_rank import current
from notebook_accel.training import collectives
from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.models import (
    ReplacedForward,
    has_parts,
    local_part,
    retie_parameters,
    tied_names,
    weights_of,
)
from notebook_accel.training.processes.topology import HAS_MESH
from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.settings.handlers import DistributedType
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.settings.parallelism import ParallelismConfig, fit_sizes
from notebook_accel.training.strategies import context, dtensors
from notebook_accel.training.strategies.base import LossFunction, ModelToPrepare, Request, Strategy
from notebook_accel.training.strategies.compiling import compile_in_place

# Tensor parallelism: how a layer is divided over ranks, by the name of the style in Transformers.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # The output is gathered, so that what comes after (a loss) sees all of it.
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    # The input is whole on every rank, each of which takes its columns of it.
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    # Every rank looks all words up, in its rows or its columns of the table.
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    # A norm of each attention head: every rank holds its own heads already, and gradients are
    # summed. Torch only wants the name of some divided dimension: any but the last will do, which
    # the norm is over.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(
        sequence_dim=0, use_local_output=True
    ),
}

# What views call the dimensions of a mesh.
_LABELS = {"pp": "PP", "dp_replicate": "replicas", "cp": "CP", "tp": "TP"}


class MeshParallel(Strategy):
    """Strategy for sharded weights and tensor parallelism over one mesh."""

    spreads_weights = True
    parallelism: ParallelismConfig

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        sharding = request.plugins.get("fsdp_plugin")
        asked = request.plugins.get("parallelism_config")
        self.plugin = sharding or FullyShardedDataParallelPlugin(fsdp_version=2)
        self.parallelism = fit_sizes(
            asked,
            sharding,
            num_processes=self.topology.num_processes,
            local_num_processes=self.topology.local_num_processes,
        )
        sizes = self.parallelism
        if sharding is not None or sizes.dp_shard_enabled or sizes.cp_enabled:
            self.distributed_type = DistributedType.FSDP
        spread = [f"{word} {n}" for name, word in _LABELS.items() if (n := sizes.sizes[name]) > 1]
        shards = ["FSDP2"] * (self.distributed_type is DistributedType.FSDP)
        self.label = " + ".join(shards + spread)
        dimensions = [name for name, size in sizes.sizes.items() if size > 1]
        if sizes.dp_replicate_enabled and "dp_shard" not in dimensions:
            # fully_shard replicates over the first of two dimensions: the second may have one rank.
            dimensions.insert(dimensions.index("dp_replicate") + 1, "dp_shard")
        current().shared[HAS_MESH] = True
        self.mesh = sizes.arrange_ranks(self.topology.device.type, dimensions)
        self.parallelism.device_mesh = self.mesh
        if asked is not None:
            asked.device_mesh = self.mesh
        if sizes.cp_enabled:
            exchange = sizes.cp_handler.cp_comm_strategy
            self.sequences = context.SequenceDivider(
                self.mesh["cp"], device=self.topology.device, exchange=exchange
            )
        here = self.topology.process_index
        self.data_group = DataGroup.of_mesh(self.mesh, here, makes_group=True)
        # The new weight of each one that was replaced: an optimizer may be prepared later.
        # Weak by identity: the old weight goes as soon as no optimizer holds it.
        self._replaced = WeakIdKeyDictionary()

    @property
    def saves_shards(self) -> bool:
        # Asked each time: a script may change it before its last save.
        return self.plugin.saves_shards

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        dtensors.remap(optimizer, self._replaced)
        # Its step treats all weights as one vector. In a pipeline, a rank has only the weights of
        # its stages, and weights of several meshes cannot be joined into a vector.
        if isinstance(optimizer, torch.optim.LBFGS) and (
            self.parallelism.pp_enabled or len(dtensors.by_mesh(weights_of(optimizer))) > 1
        ):
            sizes = {name: size for name, size in self.parallelism.sizes.items() if size > 1}
            raise ConfigError(
                f"{type(optimizer).__name__} steps all weights as one vector, and with "
                f"{', '.join(f'{name}_size={size}' for name, size in sizes.items())} no rank has "
                "one: expected an optimizer that steps each weight by itself, such as AdamW, or "
                "replicas, or shards alone (dp_shard_size)"
            )
        return optimizer

    def prepare_model(self, given: ModelToPrepare) -> Module:
        if not given.training:
            return super().prepare_model(given)
        assert self.mesh is not None
        model = given.model
        known = [other for other in self.spread if other is not model]
        others = {id(weight) for other in known for weight in other.parameters()}
        self._refuse_shared_weights(model, others)
        if self._is_spread(model):
            return super().prepare_model(given)
        self.spread.add(model)
        # By module, not by name: wrappers of modules inside change the names. Held weakly: a device
        # has no room for both the shards and the weights before.
        before = [
            (part, name, TensorWeakRef(weight))
            for part in model.modules()
            for name, weight in part.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self._spread_model(model)
        for part, name, held in before:
            new, weight = getattr(part, name), held()
            if weight is not None and new is not weight:
                if weight.requires_grad and id(weight) in others:
                    raise shared_weight(model, name)
                self._replaced[weight] = new
        return model

    def _spread_model(self, model: Module) -> None:
        """Shard and divide a model over the mesh, in place; all ranks call it.

        Every rank has it in full, on any device, or divided over the mesh dimension "tp" already.
        """
        assert self.mesh is not None
        mesh, parallelism, plugin = self.mesh, self.parallelism, self.plugin
        device, dtype = self.topology.device, self.precision.dtype
        dimensions = mesh.mesh_dim_names or ()
        # One dimension shards; of two, the first replicates what the second shards. A weight is
        # sharded over "dp_shard" and "cp" as over one.
        shards = [name for name in ("dp_shard", "cp") if name in dimensions]
        replicas = [name for name in ("dp_replicate",) if name in dimensions]
        data = (*replicas, *(["dp_shard_cp"] if len(shards) > 1 else shards))
        data = () if parallelism.pp_enabled and not parallelism.dp_shard_enabled else data
        # Found now: the plugin names the modules to ignore, and names change once a stage has
        # dropped blocks.
        ignored = plugin.ignored_parts(model) if data else []
        stored = dtype if data else None
        make_ready = partial(_make_ready, device=device, plugin=plugin, dtype=stored)
        # Every rank decides alike, even if only some have read the weights: all broadcast in one
        # order. It may wait for step 6 where the steps between take weights as they are, and no
        # weight is in both a unit and an ignored module.
        is_ready = "pp" in dimensions or "tp" in dimensions or bool(ignored)
        if is_ready:
            make_ready(model, home=torch.device("cpu"))
        own_blocks = self.cut(model)
        if "tp" in dimensions:
            divide_layers(model, mesh["tp"], parallelism.tp_plan)
        chosen = choose_modules(model, plugin)
        if plugin.activation_checkpointing:
            checkpoint_activations(chosen, plugin)
        compile_in_place(model, self.request.dynamo, own_blocks)
        if "cp" in dimensions:
            context.fit_decoder(model)
        kept_whole = {weight for part in ignored for weight in part.parameters()}
        for unit, inside in units(model, chosen, own_blocks) if data else ():
            self._shard(unit, inside, mesh[data], kept_whole, None if is_ready else make_ready)
        for values in (*model.parameters(), *model.buffers()):
            if not has_parts([values]):  # before a hook has noted where a weight lies
                values.data = values.data.to(device)
        if kept_whole and not own_blocks:  # a pipeline averages what is whole, after the batch
            # Not mesh["dp_cp"], by which torch warns.
            everyone = of_torch.flatten_mesh(mesh[tuple(parallelism.dp_cp_dim_names)], "dp_cp")
            average_gradients(kept_whole, everyone.get_group())
        # The blocks of a pipeline's stage run forward for several micro-batches first.
        if data and not own_blocks and plugin.reshard_after_forward:
            model.register_forward_pre_hook(keep_root_for_backward)
        dtensors.accept_whole_weights(model)

    def _shard(
        self,
        model: Module,
        chosen: Iterable[Module],
        mesh: DeviceMesh,
        ignored: set[Parameter],
        make_ready: Callable[[Module], None] | None,
    ) -> None:
        """Shard the chosen modules and then the model by ``fully_shard``, in place.

        All ranks call it. Every rank has the model's full weights, or their part over another
        dimension of the mesh (tensor parallelism).
        """
        plugin = self.plugin
        policy = plugin.precision_policy(self.precision.dtype)
        for part in (*chosen, model):
            if make_ready is not None:
                make_ready(part)
            whole = {weight for weight in part.parameters() if weight.requires_grad}
            # With an output type on an inner module the next one gets what its weights are not:
            # "mat1 and mat2 must have the same dtype".
            fully_shard(
                part,
                mesh=mesh,
                mp_policy=policy if part is model else replace(policy, output_dtype=None),
                reshard_after_forward=plugin.reshard_after_forward,
                offload_policy=plugin.offload_policy(self.topology.device),
                ignored_params=ignored or None,
            )
            # The memory of weights that shards have replaced, of which an optimizer may hold some:
            # else each rank's device would hold the whole model until the last module is sharded.
            # Frozen ones are left to whoever holds them: another model may use them too.
            for weight in whole.difference(part.parameters()):
                if not isinstance(weight, DTensor):
                    weight.data = weight.data.new_empty(0)
            del whole

    def cut(self, model: Module) -> list[Module]:
        """Cut the model into the stages of a pipeline; return this rank's blocks, if it is one."""
        return []

    def _refuse_shared_weights(self, model: Module, others: set[int]) -> None:
        """Refuse a model that shares weights with another prepared model, if they would diverge."""
        weights = dict(model.named_parameters())
        for name, weight in weights.items():
            if weight.requires_grad and weight in self._replaced:
                raise shared_weight(model, name)
        # The other model's parts stay as they are, and nobody would average the rest of this one.
        shared = next((name for name, weight in weights.items() if id(weight) in others), None)
        trains = (weight for weight in weights.values() if weight.requires_grad)
        is_partly_whole = not all(isinstance(weight, DTensor) for weight in trains)
        if shared and is_partly_whole and self.data_group.size > 1 and has_parts(weights.values()):
            raise shared_weight(model, shared)

    def _is_spread(self, model: Module) -> bool:
        """Return whether the user has sharded a model already, so that it is left as it is.

        A model that Transformers' ``from_pretrained`` has divided by tensor parallelism alone (over
        the dimension "tp") does not count if this mesh has further dimensions: it is still sharded
        over those.
        """
        assert self.mesh is not None
        if not has_parts(model.parameters()):
            return False
        parts = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
        along = {name for part in parts for name in part.device_mesh.mesh_dim_names or ()}
        return along != {"tp"} or self.mesh.mesh_dim_names == ("tp",)

    def forward_backward(
        self, model: Module, inputs: Any, targets: Any, loss_function: LossFunction, num_steps: int
    ) -> torch.Tensor:
        loss = super().forward_backward(model, inputs, targets, loss_function, num_steps)
        if self.parallelism.cp_enabled:
            assert self.mesh is not None
            # Each rank has computed that of its part of the sequences.
            loss = collectives.reduce(loss, "mean", group=self.mesh["cp"].get_group())
        return loss

    def buffers_elsewhere(self, model: Module) -> set[str]:
        """Return the buffers that another rank saves: a checkpoint has one of each."""
        assert self.mesh is not None
        places = zip(self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or (), strict=True)
        is_first = not any(place for name, place in places if name != "pp")
        return set() if is_first else {name for name, _ in model.named_buffers()}

    def state_dict(self, model: Module, *, full: bool, keeps: bool = True) -> dict[str, Any]:
        if not full:
            elsewhere = self.buffers_elsewhere(model)
            return {
                name: value for name, value in model.state_dict().items() if name not in elsewhere
            }
        config = self.plugin.state_dict_config
        is_about_whole = hasattr(config, "rank0_only")  # torch's FullStateDictConfig
        is_for_others = is_about_whole and config.rank0_only and self.topology.process_index != 0
        return dtensors.whole_state_dict(
            model,
            keeps=keeps and not is_for_others,
            to_cpu=not is_about_whole or config.offload_to_cpu,
        )


def shared_weight(model: Module, name: str) -> ConfigError:
    """Return the error for a weight that a model shares with another prepared model."""
    return ConfigError(
        f"{type(model).__name__} has the weight {name!r} in common with a model that was prepared "
        "before, and where weights are spread over the ranks the two would part: expected models "
        "without common weights. Prepare one module that has both as parts, and calls them in its "
        "forward"
    )


def _make_ready(
    model: Module,
    *,
    device: torch.device,
    plugin: FullyShardedDataParallelPlugin,
    dtype: torch.dtype | None,
    home: torch.device | None = None,
) -> None:
    """Initialize a module's weights before it is sharded; all ranks call it.

    Trainable weights of 16 bits become float32, as in Accelerate under FSDP. The optimizer then
    steps float32 weights, while forward and backward use ``dtype``. In bfloat16 most steps would
    have no effect: a change smaller than 2**-9 of a weight is rounded away.
    """
    fill_empty(model, home or device, plugin)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    found = [weight for weight in trained if weight.dtype.itemsize == 2] if dtype else []
    for weight in found:
        weight.data = weight.data.float()
    if found:
        notice_once(
            "weights in full precision",
            "weights of 16 bits that train are kept and stepped in float32, as mixed precision "
            f"under FSDP means, and computed with in {str(dtype).removeprefix('torch.')}: "
            'checkpoints hold float32; mixed_precision="no" steps them as they are',
        )
    for values in (*model.parameters(), *model.buffers()) if plugin.sync_module_states else ():
        if not has_parts([values]):  # rank 0's, as DDP does
            sent = values.data.to(device)
            collectives.broadcast(sent)
            values.data.copy_(sent)


def fill_empty(model: Module, device: torch.device, plugin: FullyShardedDataParallelPlugin) -> None:
    """Allocate weights and buffers that are on the meta device on ``device``; initialize them.

    The plugin's ``param_init_fn`` initializes a module, else its own ``reset_parameters``; with
    neither, the values are arbitrary. Each rank draws its own random values, which rank 0's may
    replace afterwards.
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


def divide_layers(model: Module, mesh: DeviceMesh, plan: Mapping[str, Any] | None) -> None:
    """Divide the layers that the plan names over the ranks of ``mesh``, in place.

    All ranks of the mesh call it.

    Args:
        mesh: a mesh of one dimension.
        plan: style of each layer, by module name or pattern ("layers.*.up": "colwise"). None takes
            the model's attribute ``tp_plan`` or ``_tp_plan``, which Transformers sets.
    """
    if has_parts(model.parameters()):
        return
    if plan is None:
        plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise ConfigError(
            f"tp_size={mesh.size()} divides layers by a plan, and {type(model).__name__} has none: "
            'give ParallelismConfig(tp_plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"})'
        )
    styles: dict[str, ParallelStyle] = {}
    for name, part in model.named_modules():
        style = next((style for key, style in plan.items() if fnmatch.fnmatchcase(name, key)), None)
        if style is not None and name:
            _check_divisible(name, part, style, mesh.size())
            styles[name] = _as_style(name, style)
    if not styles:
        raise ConfigError(
            f"the tp_plan names {', '.join(map(repr, plan))}, and {type(model).__name__} has no "
            f"module of such a name; it has {', '.join(name for name, _ in model.named_children())}"
        )
    ties = tied_names(model)
    parallelize_module(model, mesh, styles)
    _check_alike(model, ties)
    retie_parameters(model, ties)
    for weight in model.parameters():
        if isinstance(weight, DTensor) and weight.is_floating_point():
            # Of a weight that each rank has whole, torch leaves the gradient as a sum to be made
            # (``Partial``) where a norm is replicated, and what is not linear in it (clipping) then
            # fails, or is lost without a word on torch 2.11: it is summed at once.
            needs_gradient = weight.requires_grad
            weight.requires_grad_()  # a hook wants it; the user may unfreeze the weight later
            weight.register_hook(  # type: ignore[no-untyped-call]
                lambda grad, placements=weight.placements: grad.redistribute(placements=placements)
            )
            weight.requires_grad_(needs_gradient)


def _as_style(name: str, given: Any) -> ParallelStyle:
    if isinstance(given, ParallelStyle):
        return given
    if given not in _STYLES:
        raise ConfigError(
            f"the tp_plan says {given!r} for {name!r}: expected one of {', '.join(_STYLES)}, or a "
            "ParallelStyle of torch. What else a model of Transformers plans (for experts, say) it "
            "does itself: from_pretrained(..., distributed_config=DistributedConfig(tp_size=...)) "
            "gives a model that prepare() takes as it is"
        )
    return _STYLES[given]()


def _check_divisible(name: str, part: Module, style: Any, size: int) -> None:
    """Refuse a layer that cannot be divided evenly, since later layers would get wrong shapes."""
    weight = getattr(part, "weight", None)
    if weight is None or not isinstance(style, str) or "wise" not in style:
        return
    # An embedding's weight is (rows, features), a linear layer's (out, in).
    is_linear = hasattr(part, "in_features")
    dimension = (0 if is_linear else 1) if "colwise" in style else (1 if is_linear else 0)
    if weight.ndim > dimension and weight.shape[dimension] % size:
        raise ConfigError(
            f"the tp_plan divides {name!r} of shape {tuple(weight.shape)} over {size} ranks: "
            f"expected its dimension {dimension} to be a multiple of {size}"
        )


def _check_alike(model: Module, ties: Sequence[Sequence[str]]) -> None:
    """Refuse a model in which the plan divides a tied weight differently under its names."""
    for names in ties:
        weights = [model.get_parameter(name) for name in names]
        layouts = {weight.placements if isinstance(weight, DTensor) else None for weight in weights}
        if len(layouts) > 1:
            raise ConfigError(
                f"{' and '.join(map(repr, names))} are one weight, and the tp_plan divides them in "
                "different ways: divide both alike (an embedding rowwise, its head colwise), or "
                "neither"
            )


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


def average_gradients(weights: Iterable[Parameter], group: dist.ProcessGroup) -> None:
    """Add hooks that average the gradients of unsharded weights over the ranks in each backward.

    ``fully_shard`` does not touch weights that it ignores: without the hooks, each rank would
    update them by the gradients of its own samples. With gradient accumulation, each backward
    averages the earlier sum again, which is harmless: that sum is equal on all ranks already.
    """

    def average(weight: torch.Tensor) -> None:
        own = local_part(weight.grad)
        own.copy_(collectives.reduce(own, "mean", group=group))

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
