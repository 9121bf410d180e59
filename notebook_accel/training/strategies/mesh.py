"""Parallelism over a device mesh: sharding, replicas and tensor parallelism, combined.

The ranks form a mesh. Its last dimension holds neighbouring ranks, which share a machine: it is for
tensor parallelism, which communicates most::

    ParallelismConfig(dp_shard_size=2, tp_size=2)      dp_shard
                                                    0: [ rank 0, rank 1 ]   tp ->
                                                    1: [ rank 2, rank 3 ]

Ranks of one column read different samples and hold different shards. Ranks of one row read the same
samples and compute parts of the same layers. ``parallelize`` has the steps by which a model is
sharded and divided over the mesh.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from notebook_accel.errors import ConfigError
from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.models import has_parts, weights_of
from notebook_accel.training.processes.topology import note_mesh
from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.settings.handlers import DistributedType
from notebook_accel.training.settings.parallelism import ParallelismConfig, fit_sizes
from notebook_accel.training.strategies import dtensors, parallelize
from notebook_accel.training.strategies.base import AgreeingScaler, Strategy
from notebook_accel.training.strategies.context import SequenceDivider
from notebook_accel.training.strategies.strategy_request import (
    LossFunction,
    ModelToPrepare,
    Request,
)

# What views call the dimensions of a mesh.
_LABELS = {"pp": "PP", "dp_replicate": "replicas", "cp": "CP", "tp": "TP"}


class MeshParallel(Strategy):
    """Strategy for sharded weights and tensor parallelism over one mesh."""

    spreads_weights = True
    kind_of_scaler = AgreeingScaler
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
        note_mesh()
        self.mesh = sizes.arrange_ranks(self.topology.device.type, dimensions)
        self.parallelism.device_mesh = self.mesh
        if asked is not None:
            asked.device_mesh = self.mesh
        if sizes.cp_enabled:
            exchange = sizes.cp_handler.cp_comm_strategy
            self.sequences = SequenceDivider(
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
        parallelize.parallelize(model, self.mesh, self.parallelism, self.plugin, self.request)
        for part, name, held in before:
            new, weight = getattr(part, name), held()
            if weight is not None and new is not weight:
                if weight.requires_grad and id(weight) in others:
                    raise shared_weight(model, name)
                self._replaced[weight] = new
        return model

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
            dist.all_reduce(loss, group=self.mesh["cp"].get_group())
            loss /= self.parallelism.sizes["cp"]
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
