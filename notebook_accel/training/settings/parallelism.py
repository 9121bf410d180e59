"""``ParallelismConfig``: the number of ranks for each kind of parallelism.

Its fields and environment variables are those of Hugging Face Accelerate. This package adds those
for pipeline parallelism (``pp_*``, ``num_microbatches``) and ``tp_plan`` for tensor parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from notebook_accel.config.checks import as_choice, as_count
from notebook_accel.config.plugins import MeshOptions
from notebook_accel.config.setting import documented, settings_of
from notebook_accel.errors import ConfigError
from notebook_accel.private import of_torch
from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.settings.handlers import StrategyPlugin

_SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B")


@dataclass
class TorchContextParallelConfig:
    """Settings of context parallelism, in which each rank computes a part of every sequence.

    They are for ``ParallelismConfig(cp_handler=...)``, and say how the ranks exchange the keys and
    values of attention.

    Raises:
        ConfigError: ``cp_comm_strategy`` is neither "allgather" nor "alltoall".
    """

    cp_comm_strategy: str | None = None
    """"allgather" (all at once) or "alltoall" (from rank to rank in a ring, for less memory).
    Variable PARALLELISM_CONFIG_CP_COMM_STRATEGY, else "allgather"; on the CPU always that."""

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            wanted = os.environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "").strip()
            self.cp_comm_strategy = wanted or "allgather"
        as_choice("cp_comm_strategy", self.cp_comm_strategy, ("allgather", "alltoall"))


@documented
@dataclass
class ParallelismConfig(StrategyPlugin, MeshOptions):
    """Number of ranks for each kind of parallelism.

    The product of these sizes has to be the number of all ranks, or 1 for plain data parallelism.
    The ranks form a device mesh with these dimensions, the innermost last: "pp" (pipeline),
    "dp_replicate" (copies of the model), "dp_shard" (FSDP), "cp" (parts of sequences) and "tp"
    (parts of layers). Ranks with the same indices in "dp_replicate" and "dp_shard" read the same
    samples.

    Attributes:
        device_mesh: the mesh; None until an ``Accelerator`` or ``get_device_mesh`` makes it.

    Raises:
        ConfigError: a size is no whole number of at least 1, or a value is unknown.

    Example:
        >>> from notebook_accel import Accelerator, ParallelismConfig, notebook_launcher
        >>> def train():
        ...     accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))
        ...     return accelerator.data_parallel_shard_rank
        >>> run = notebook_launcher(train, num_processes=2)
        >>> run.results
        [0, 1]
    """

    switch = "USE_PARALLELISM_CONFIG"

    def __post_init__(self) -> None:
        self.device_mesh: DeviceMesh | None = None
        for name, option in settings_of(MeshOptions).items():
            if getattr(self, name) is None:
                setattr(self, name, option.from_environment())
            setattr(self, name, option.checked(f"ParallelismConfig: {name}", getattr(self, name)))
        if self.sp_size is None:
            text = os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "").strip()
            self.sp_size = int(text) if text.isdecimal() else 1
        self._check_backends()
        as_choice("ParallelismConfig: pp_schedule", self.pp_schedule, _SCHEDULES)
        if self.num_microbatches is not None:
            as_count("ParallelismConfig: num_microbatches", self.num_microbatches)
        if self.pp_enabled and self.cp_enabled:
            raise ConfigError(
                f"ParallelismConfig has pp_size={self.sizes['pp']} and cp_size={self.sizes['cp']}: "
                "a pipeline does not compose with divided sequences; use dp_shard_size, "
                "dp_replicate_size or tp_size for the other ranks"
            )
        size, number, expected = self.sizes["pp"], self.num_microbatches, ""
        if self.pp_schedule == "1F1B" and number is not None and number < size:
            expected = f"{size} or more"
        elif self.pp_schedule == "Interleaved1F1B" and number is not None and number % size:
            expected = f"a multiple of {size}"
        if expected:
            raise ConfigError(
                f"ParallelismConfig(pp_size={size}, pp_schedule={self.pp_schedule!r}, "
                f"num_microbatches={number}): this schedule expects {expected}"
            )

    def _check_backends(self) -> None:
        for name, known in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            if (given := getattr(self, name)) is None:
                variable = f"PARALLELISM_CONFIG_{name.upper()}"
                given = as_choice(variable, os.environ.get(variable, "").strip() or known, [known])
                setattr(self, name, given)
            if given != known:
                raise ConfigError(f"ParallelismConfig({name}={given!r}): expected {known!r}")
        if isinstance(self.sp_size, int) and self.sp_size > 1:
            raise ConfigError(
                f"ParallelismConfig(sp_size={self.sp_size}): sequences that are divided by "
                "all-to-all (ALST, Ulysses) belong to DeepSpeed's strategy; to divide sequences "
                "without it, use cp_size"
            )
        if self.tp_enabled and self.tp_handler is None:
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig() if self.cp_enabled else None
        elif not isinstance(self.cp_handler, TorchContextParallelConfig):
            raise ConfigError(
                f"ParallelismConfig(cp_handler=) is a {type(self.cp_handler).__name__}: expected "
                "a TorchContextParallelConfig"
            )

    def check_ranks(
        self, plugins: Mapping[str, Any], num_processes: int, local_num_processes: int
    ) -> None:
        """Raise if the sizes do not fit the number of ranks, as :func:`fit_sizes` does."""
        fit_sizes(
            self,
            plugins.get("fsdp_plugin"),
            num_processes=num_processes,
            local_num_processes=local_num_processes,
        )

    @property
    def divides_layers(self) -> bool:  # type: ignore[override]
        """Whether ranks hold parts of layers and compute each layer together (``tp_size`` > 1)."""
        return self.tp_enabled

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks of each mesh dimension by name ("pp", "dp_replicate", "dp_shard", ...).

        The innermost dimension comes last.
        """
        return {name: getattr(self, f"{name}_size") for name in _DIMENSIONS}

    @property
    def total_size(self) -> int:
        """Product of the sizes: the number of all ranks, or 1 for plain data parallelism."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Number of parts into which the samples are divided: "dp_replicate" times "dp_shard"."""
        return int(self.sizes["dp_replicate"] * self.sizes["dp_shard"])

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that read the same samples and work on them together."""
        return int(self.sizes["pp"] * self.sizes["cp"] * self.sizes["tp"])

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of the mesh dimensions with several ranks."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def dp_dim_names(self) -> list[str]:
        """Names of the mesh dimensions with several ranks that read different samples.

        The mesh also has them flattened into one dimension, "dp".
        """
        return self._several("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Names of the mesh dimensions with several ranks that read the same samples."""
        return self._several("tp", "cp", "pp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Names of the mesh dimensions with several ranks over which FSDP shards weights.

        The mesh also has them flattened into one dimension, "dp_shard_cp".
        """
        return self._several("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Names of the mesh dimensions with several ranks over which the loss is averaged.

        The mesh also has them flattened into one dimension, "dp_cp".
        """
        return self._several("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Names of the mesh dimensions that torch's ``fully_shard`` takes.

        They are "dp_shard_cp", and before it "dp_replicate" if there are several replicas.
        """
        return [*self._several("dp_replicate"), "dp_shard_cp"]

    def _several(self, *names: str) -> list[str]:
        return [name for name in names if self.sizes[name] > 1]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Make a device mesh of all ranks; None if every size is 1. All ranks have to call it.

        Args:
            device_type: the type of the ranks' devices, such as "cuda" or "cpu".
        """
        dimensions = [name for name, size in self.sizes.items() if size > 1]
        return self.arrange_ranks(device_type, dimensions) if dimensions else None

    def arrange_ranks(self, device_type: str, dimensions: Sequence[str]) -> DeviceMesh:
        """Make a device mesh with the given dimensions. All ranks have to call it.

        The mesh also gets the flattened dimensions "dp", "dp_shard_cp" and "dp_cp", each only if
        one of the dimensions in it has more than one rank.

        Args:
            device_type: the type of the ranks' devices, such as "cuda" or "cpu".
            dimensions: names of :attr:`sizes`, the innermost last.
        """
        shape = tuple(self.sizes[name] for name in dimensions)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=tuple(dimensions))
        for joined, names in (
            ("dp", self.dp_dim_names),
            ("dp_shard_cp", self.dp_shard_cp_dim_names),
            ("dp_cp", self.dp_cp_dim_names),
        ):
            if names:
                of_torch.flatten_mesh(mesh[tuple(names)], joined)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return ``device_mesh``; if it is None, make the mesh first.

        If there is no mesh yet, all ranks have to call this.

        Args:
            device_type: such as "cuda" or "cpu"; only needed to make the mesh.

        Returns:
            the mesh; None if every size is 1.

        Raises:
            ConfigError: there is no mesh yet and no ``device_type`` was given, or the mesh has
                devices of another type.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ConfigError(
                    "ParallelismConfig.get_device_mesh() has no mesh yet: make the Accelerator "
                    'first, or pass the type of its devices, such as "cuda" or "cpu"'
                )
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, self.device_mesh.device_type):
            raise ConfigError(
                f"ParallelismConfig.get_device_mesh({device_type!r}): there is a mesh of "
                f"{self.device_mesh.device_type!r} devices already; leave the type out to get it"
            )
        return self.device_mesh

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, with the fields of handlers as nested dictionaries."""
        return asdict(self)

    def __getstate__(self) -> dict[str, Any]:
        # A mesh belongs to the process group of its ranks.
        return {**vars(self), "device_mesh": None}

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several replicas of the model (``dp_replicate_size`` > 1)."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether weights are sharded over ranks with different samples (``dp_shard_size`` > 1)."""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether ranks compute each layer together (``tp_size`` > 1)."""
        return self.sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether ranks compute parts of each sequence (``cp_size`` > 1)."""
        return self.sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether DeepSpeed divides sequences: False, since ``sp_size`` above 1 is refused."""
        return self.sp_size != 1

    @property
    def pp_enabled(self) -> bool:
        """Whether the model is split into the stages of a pipeline (``pp_size`` > 1)."""
        return self.sizes["pp"] > 1


_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def fit_sizes(
    asked: ParallelismConfig | None,
    plugin: FullyShardedDataParallelPlugin | None,
    *,
    num_processes: int,
    local_num_processes: int,
) -> ParallelismConfig:
    """Return the sizes of the device mesh; all are 1 for plain data parallelism.

    If there is an FSDP plugin, and ``asked`` sets neither "dp_replicate" nor "dp_shard", both
    follow from the plugin's sharding strategy and the number of ranks. Other sizes are those of
    ``asked``.

    Args:
        asked: the user's sizes; None if the user gave none.
        plugin: the user's FSDP plugin; None if there is none.
    """
    if plugin is not None and (asked is None or asked.data_parallel_size == 1):
        asked = asked or ParallelismConfig(dp_replicate_size=1, dp_shard_size=1)
        left = num_processes // asked.non_data_parallel_size
        shards = left
        name = plugin.sharding_strategy.name
        if name == "NO_SHARD":
            shards = 1
        elif "HYBRID" in name:
            # Of a machine's ranks, neighbours divide layers and sequences of one share.
            within, rest = divmod(local_num_processes, asked.sizes["cp"] * asked.sizes["tp"])
            if within and not rest and left % within == 0:
                shards = within
        if left:
            asked = replace(asked, dp_shard_size=shards, dp_replicate_size=left // shards)
    asked = asked or ParallelismConfig()
    # Sizes that ask for nothing leave the ranks to plain data parallelism.
    if asked.total_size not in (1, num_processes):
        sizes = " x ".join(f"{name} {size}" for name, size in asked.sizes.items())
        raise ConfigError(
            f"ParallelismConfig takes {asked.total_size} ranks ({sizes}) and there are "
            f"{num_processes}: expected sizes whose product is the number of ranks; launch "
            f"{asked.total_size}, or set dp_shard_size"
        )
    return asked


@dataclass
class TorchTensorParallelConfig:
    """Settings of tensor parallelism, for ``ParallelismConfig(tp_handler=...)``.

    They are accepted for scripts that were written for Accelerate, and have no effect.
    """

    enable_async_tp: bool = False
    """Accepted: communication and compute within a layer do not overlap here."""
