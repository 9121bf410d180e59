"""Parallelism over a device mesh: shards, replicas and divided layers, composed.

The ranks form a mesh, the innermost dimension last (neighbours share a machine, and divided
layers talk most)::

    ParallelismConfig(dp_shard_size=2, tp_size=2)      dp_shard
                                                    0: [ rank 0, rank 1 ]   tp ->
                                                    1: [ rank 2, rank 3 ]

Ranks of one column have different samples and shards; ranks of one row the same samples, and
parts of the same layers. How a model is spread over it is in ``recipe``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from notebook_accel.training.data_group import DataGroup
from notebook_accel.training.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.parallelism import fit_sizes
from notebook_accel.training.renewal import note_mesh
from notebook_accel.training.settings import DistributedType
from notebook_accel.training.strategies import dtensors, recipe
from notebook_accel.training.strategies.given import TakesSpreadModels, has_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.optim import Optimizer

    from notebook_accel.training.parallelism import ParallelismConfig
    from notebook_accel.training.strategies.request import ModelToPrepare, PrepareCall, Request
    from notebook_accel.training.topology import Topology

__all__ = ["MeshParallel"]


class MeshParallel(TakesSpreadModels):
    """Weights in parts: torch's ``fully_shard`` and tensor parallelism over one mesh.

    Attributes:
        parallelism: how many ranks each kind of parallelism has.
        plugin: how weights are sharded.
    """

    spreads_weights = True
    kind_of_scaling = dtensors.AgreeingScaling
    parallelism: ParallelismConfig

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.scaling = self.precision.make_scaling(self.kind_of_scaling)
        self.plugin = request.fsdp or FullyShardedDataParallelPlugin(fsdp_version=2)
        self.parallelism = fit_sizes(
            request.parallelism,
            request.fsdp,
            num_processes=self.topology.num_processes,
            local_num_processes=self.topology.local_num_processes,
        )
        sizes = self.parallelism
        if request.fsdp is not None or sizes.dp_shard_enabled or sizes.cp_enabled:
            self.distributed_type = DistributedType.FSDP
        self.mesh = self.parallelism.device_mesh = _make_mesh(self.parallelism, self.topology)
        if request.parallelism is not None:
            request.parallelism.device_mesh = self.mesh
        here = self.topology.process_index
        self.data_group = DataGroup.of_mesh(self.mesh, here, makes_group=True)
        # The new weight of each one that was replaced: an optimizer may be prepared later.
        # Weak by identity: the old weight goes as soon as no optimizer holds it.
        self._replaced = WeakIdKeyDictionary()

    @property
    def saves_shards(self) -> bool:
        # Asked each time: a script may change it before its last save.
        return self.plugin.saves_shards

    @property
    def layout(self) -> list[list[Any]]:
        assert self.mesh is not None
        sizes = zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True)
        return [*([name, size] for name, size in sizes), *super().layout]

    def prepare(self, call: PrepareCall) -> tuple[list[Module], list[Optimizer]]:
        models, optimizers = super().prepare(call)
        for optimizer in optimizers:
            dtensors.remap(optimizer, self._replaced)
        return models, optimizers

    def prepare_model(self, given: ModelToPrepare) -> Module:
        if not given.training or self._is_spread(given.model):
            return super().prepare_model(given)
        assert self.mesh is not None
        model = given.model
        self._in_parts.add(model)
        # By module, not by name: wrappers of modules inside change the names.
        before = [
            (part, name, weight)
            for part in model.modules()
            for name, weight in part._parameters.items()
            if weight is not None
        ]
        recipe.spread(
            model,
            self.mesh,
            parallelism=self.parallelism,
            plugin=self.plugin,
            dynamo=self.dynamo,
            dtype=self.precision.dtype,
            device=self.topology.device,
        )
        for part, name, weight in before:
            new = part._parameters[name]
            if new is not weight:
                self._replaced[weight] = new
        return model

    def _is_spread(self, model: Module) -> bool:
        """Whether a model was spread before ``prepare``, and is taken as it is.

        One whose layers alone are divided (``from_pretrained`` of Transformers does it, over the
        dimension "tp" of a mesh) is still to be sharded where the mesh has more dimensions.
        """
        assert self.mesh is not None
        if not has_parts(model.parameters()):
            return False
        parts = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
        along = {name for part in parts for name in part.device_mesh.mesh_dim_names or ()}
        return along != {"tp"} or self.mesh.mesh_dim_names == ("tp",)

    def divide_sequences(
        self,
        buffers: Sequence[torch.Tensor],
        seq_dims: Sequence[int],
        no_restore: set[torch.Tensor],
    ) -> AbstractContextManager[Any]:
        if not self.parallelism.cp_enabled:
            return super().divide_sequences(buffers, seq_dims, no_restore)
        # Imported here: torch's attention over parts takes a second, for those who use it alone.
        from notebook_accel.training.strategies import context

        assert self.mesh is not None
        return context.divided_sequences(
            self.mesh["cp"],
            buffers,
            seq_dims,
            no_restore,
            device=self.topology.device,
            exchange=self.parallelism.cp_handler.cp_comm_strategy,
        )

    def forward_backward(
        self,
        model: Module,
        inputs: Any,
        targets: Any,
        loss_function: Callable[[Any, Any], torch.Tensor],
        num_steps: int = 1,
    ) -> torch.Tensor:
        loss = super().forward_backward(model, inputs, targets, loss_function, num_steps)
        if self.parallelism.cp_enabled:
            assert self.mesh is not None
            # Each rank has computed that of its part of the sequences.
            dist.all_reduce(loss, group=self.mesh["cp"].get_group())
            loss /= self.parallelism.sizes["cp"]
        return loss

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        return dtensors.clip_grad_norm(parameters, max_norm, norm_type, self.topology.device)

    def state_dict(self, model: Module, *, full: bool, keeps: bool = True) -> dict[str, Any]:
        if not full:
            return model.state_dict()
        config = self.plugin.state_dict_config
        is_about_whole = hasattr(config, "rank0_only")  # torch's FullStateDictConfig
        is_for_others = is_about_whole and config.rank0_only and self.topology.process_index != 0
        return dtensors.whole_state_dict(
            model,
            keeps=keeps and not is_for_others,
            to_cpu=not is_about_whole or config.offload_to_cpu,
        )


def _make_mesh(parallelism: ParallelismConfig, here: Topology) -> DeviceMesh:
    dimensions = [name for name, size in parallelism.sizes.items() if size > 1]
    if parallelism.dp_replicate_enabled and "dp_shard" not in dimensions:
        # fully_shard replicates over the first of two dimensions: the second may have one rank.
        dimensions.insert(dimensions.index("dp_replicate") + 1, "dp_shard")
    note_mesh()
    return parallelism.arrange_ranks(here.device.type, dimensions)
