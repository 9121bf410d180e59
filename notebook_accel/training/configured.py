"""What an ``Accelerator`` was made with, to read; and to set, for what it prepares from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from notebook_accel.errors import ConfigError
from notebook_accel.training.float8 import AORecipeKwargs
from notebook_accel.training.notices import notice_once
from notebook_accel.training.plan import check_rng_types, resolve_loaders
from notebook_accel.training.processes import ProcessView
from notebook_accel.training.settings import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    FP8BackendType,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from notebook_accel.training.state import AcceleratorState, GradientState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh

    from notebook_accel.training.data.config import DataLoaderConfiguration
    from notebook_accel.training.data_group import DataGroup
    from notebook_accel.training.deepspeed_plugin import DeepSpeedPlugin
    from notebook_accel.training.parallelism import ParallelismConfig
    from notebook_accel.training.plan import Plan
    from notebook_accel.training.settings import ProjectConfiguration

__all__ = ["ConfiguredView"]

_Handler = TypeVar("_Handler", bound=KwargsHandler)


class ConfiguredView(ProcessView):
    """Base of ``Accelerator``: its settings.

    Attributes:
        project_configuration: where the project's files are.
    """

    def __init__(self, plan: Plan, project_configuration: ProjectConfiguration) -> None:
        self._plan = plan
        self.project_configuration = project_configuration

    @property
    def state(self) -> AcceleratorState:
        """Where this rank stands, with the settings of the newest ``Accelerator``."""
        return AcceleratorState()

    @property
    def gradient_state(self) -> GradientState:
        """Where the training stands in its window and its loader."""
        return GradientState(accumulation=self._plan.accumulation)

    @property
    def distributed_type(self) -> DistributedType:
        """How the ranks belong together."""
        return self._plan.strategy.distributed_type or super().distributed_type

    @property
    def multi_device(self) -> bool:
        """Whether several ranks compute on accelerators, one each."""
        alone = (DistributedType.NO, DistributedType.MULTI_CPU)
        return self.num_processes > 1 and self.distributed_type not in alone

    @property
    def should_save_model(self) -> bool:
        """Whether this rank writes the model's files."""
        return self.is_main_process

    @property
    def mixed_precision(self) -> str:
        """The precision by its name: "no", "bf16", "fp16" or "fp8"."""
        return self._plan.precision.name

    @property
    def fp8_enabled(self) -> bool:
        """Whether the precision is "fp8"."""
        return self._plan.precision.converts_layers

    @property
    def fp8_backend(self) -> FP8BackendType:
        """What computes in 8 bits: "AO" (torchao) in the precision "fp8", else "NO"."""
        converts = self._plan.precision.converts_layers
        return FP8BackendType.AO if converts else FP8BackendType.NO

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The DeepSpeed plugin that ``prepare`` uses now; None without DeepSpeed."""
        return None if self._plan.deepspeed is None else self._plan.deepspeed.active

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """That plugin's configuration, which ``prepare`` completes; None without DeepSpeed."""
        plugin = self.deepspeed_plugin
        return None if plugin is None else plugin.deepspeed_config

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """What takes DeepSpeed's engine through a step, with ``engine`` inside; None before a model
        is prepared, and without DeepSpeed."""
        return getattr(self._plan.strategy, "engine", None)

    @property
    def is_fsdp2(self) -> bool:
        """Whether weights are sharded: ``fully_shard`` always does it here."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How many ranks each kind of parallelism has; None where neither the user nor a plugin
        said so."""
        return self._plan.strategy.parallelism

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The ranks, arranged by the kinds of parallelism; None where they are just a row."""
        return self._plan.strategy.mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether the weights are in parts over a mesh."""
        return self._plan.strategy.spreads_weights

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the data this rank reads."""
        return self._plan.strategy.data_group.index

    @property
    def data_parallel_shard_rank(self) -> int:
        """This rank's place among those that shard one copy of the model."""
        return self._place_in("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's place among those that compute each layer together."""
        return self._place_in("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This rank's place in the pipeline."""
        return self._place_in("pp")

    @property
    def context_parallel_rank(self) -> int:
        """This rank's place among those that divide each sequence."""
        return self._place_in("cp")

    @property
    def _data_group(self) -> DataGroup:
        return self._plan.strategy.data_group

    def _place_in(self, dimension: str) -> int:
        mesh = self._plan.strategy.mesh
        if mesh is None or dimension not in (mesh.mesh_dim_names or ()):
            return 0
        return mesh.get_local_rank(dimension)

    @property
    def device_placement(self) -> bool:
        """Whether ``prepare`` puts models and batches on the device."""
        return self._plan.device_placement

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        self._plan.device_placement = value

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers move with their optimizers' steps."""
        return self._plan.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        self._plan.step_scheduler_with_optimizer = value

    @property
    def rng_types(self) -> list[str]:
        """Random numbers that ranks take from rank 0 as a prepared loader begins."""
        return ["generator"] if self._plan.rng_types is None else list(self._plan.rng_types)

    @rng_types.setter
    def rng_types(self, value: Iterable[Any]) -> None:
        self._plan.rng_types = check_rng_types(value, self.device)

    @property
    def native_amp(self) -> bool:
        """Whether forwards compute in the mixed precision; False: all in full precision."""
        return self._plan.precision.is_on and self._plan.precision.dtype is not None

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        if value and self._plan.precision.dtype is None:
            notice_once(
                "native_amp",
                'native_amp=True has no effect with mixed_precision="no": make the Accelerator '
                'with mixed_precision="bf16" or "fp16"',
            )
        self._plan.precision.is_on = value

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """How autocast is entered; None: by torch's own settings."""
        return self._handler(AutocastKwargs)

    @autocast_handler.setter
    def autocast_handler(self, value: AutocastKwargs | None) -> None:
        self._set_handler(AutocastKwargs, value)
        self._plan.precision.options = value or AutocastKwargs()

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """How ``prepare`` wraps models; None: by torch's own settings."""
        return self._handler(DistributedDataParallelKwargs)

    @ddp_handler.setter
    def ddp_handler(self, value: DistributedDataParallelKwargs | None) -> None:
        self._set_handler(DistributedDataParallelKwargs, value)

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The settings of ``profile`` where it is given none; None: torch's own."""
        return self._handler(ProfileKwargs)

    @profile_handler.setter
    def profile_handler(self, value: ProfileKwargs | None) -> None:
        self._set_handler(ProfileKwargs, value)

    # Of libraries that are not used here: such a handler is refused.
    fp8_recipe_handler: None = None
    te_recipe_handler: None = None
    msamp_recipe_handler: None = None

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """How layers compute in 8 bits; None where they do not."""
        return self._handler(AORecipeKwargs) or self._plan.precision.recipe

    @property
    def has_fp8_handler(self) -> bool:
        """Whether there is one."""
        return self.ao_recipe_handler is not None

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """How the loss scaler was made; None: by torch's own settings."""
        return self._handler(GradScalerKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """How the process group was asked for; None: as the device needs it."""
        return self._handler(InitProcessGroupKwargs)

    def _handler(self, kind: type[_Handler]) -> _Handler | None:
        return next((one for one in self._plan.handlers if isinstance(one, kind)), None)

    def _set_handler(self, kind: type[KwargsHandler], value: KwargsHandler | None) -> None:
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"this handler is a {kind.__name__} or None, and a {type(value).__name__} was given"
            )
        # In place: the strategy reads the same list.
        others = [one for one in self._plan.handlers if not isinstance(one, kind)]
        self._plan.handlers[:] = [*others, *([] if value is None else [value])]

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How batches are shared out, of the loaders that are prepared from now on."""
        return self._plan.loaders

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self._plan.loaders = resolve_loaders(value)

    @property
    def split_batches(self) -> bool:
        """Whether each batch of a loader is divided over the ranks."""
        return self._plan.loaders.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 alone reads the data; None: where the dataset is iterable and its batches
        are put on the device."""
        return self._plan.loaders.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the end of the data is filled up, so that all ranks get the same number of
        batches."""
        return self._plan.loaders.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._plan.loaders.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of an epoch depends on the seed and its number alone."""
        return self._plan.loaders.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device while the host goes on."""
        return self._plan.loaders.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether prepared loaders are torchdata's too; they always have a state."""
        return self._plan.loaders.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """Folder of the project."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Folder of the project's logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The least number for the next numbered checkpoint."""
        return self.project_configuration.iteration
