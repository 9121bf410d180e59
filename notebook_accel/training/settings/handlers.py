"""Settings objects and enums for the arguments of :class:`Accelerator`.

The settings are small dataclasses that check their values; most go into ``kwargs_handlers``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, EnumMeta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from notebook_accel.config.checks import as_choice, as_count
from notebook_accel.errors import ConfigError
from notebook_accel.training.settings import environment

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import profile as Profiler  # noqa: N812


class _Texts(EnumMeta):
    """Metaclass that makes ``"bf16" in PrecisionType`` work; Python before 3.12 would raise."""

    def __contains__(cls, value: object) -> bool:
        members: Mapping[str, Any] = cls.__members__
        return str(value) in {member.value for member in members.values()}


class TextEnum(str, Enum, metaclass=_Texts):
    """Base class of enums whose members equal their text: ``x == "bf16"`` works."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return the texts of all members."""
        return [str(member) for member in cls]


class DistributedType(TextEnum):
    """How the ranks of a training work together; compare ``accelerator.distributed_type`` with it.

    Example:
        >>> from notebook_accel import Accelerator, DistributedType
        >>> Accelerator().distributed_type == DistributedType.MULTI_GPU
        False
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_TPU = "MULTI_TPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class DDPCommunicationHookType(TextEnum):
    """How ranks compress gradients before they exchange them (torch's DDP communication hooks).

    Source of "power_sgd": T. Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization" (2019).

    Example:
        >>> from notebook_accel import DDPCommunicationHookType
        >>> DDPCommunicationHookType.BF16 == "bf16"
        True
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class PrecisionType(TextEnum):
    """Names of the precisions for ``Accelerator(mixed_precision=...)``; NO is full precision."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class FP8BackendType(TextEnum):
    """Names of libraries that compute in 8 bits, as in Accelerate; this package uses AO (torchao).

    NO means that none is used.
    """

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class RNGType(TextEnum):
    """Names of random states, for ``Accelerator(rng_types=[...])``.

    Before each pass over a loader, the ranks copy the states in ``rng_types`` from rank 0.
    GENERATOR is the state of the loader's own generator.
    """

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


@dataclass
class KwargsHandler:
    """Base class of the settings objects for ``Accelerator(kwargs_handlers=[...])``."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values of all fields by name."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return, by name, the values of the fields that differ from their defaults."""
        default = type(self)()
        return {
            name: value for name, value in self.to_dict().items() if getattr(default, name) != value
        }


@dataclass
class AutocastKwargs(KwargsHandler):
    """Settings of ``torch.autocast``, for ``kwargs_handlers`` or ``accelerator.autocast``.

    Example:
        >>> from notebook_accel import Accelerator, AutocastKwargs
        >>> accelerator = Accelerator(mixed_precision="bf16")
        >>> with accelerator.autocast(AutocastKwargs(enabled=False)):
        ...     pass  # computes in float32
    """

    enabled: bool = True
    """Whether to cast at all."""
    cache_enabled: bool | None = None
    """Whether weights that were cast are kept until the outermost autocast ends."""


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Settings of fp16's loss scaling (``torch.amp.GradScaler``).

    Example:
        >>> from notebook_accel import Accelerator, GradScalerKwargs
        >>> accelerator = Accelerator(
        ...     mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]
        ... )
        >>> accelerator.scaler.get_scale()
        1024.0
    """

    init_scale: float = 65536.0
    """The first scale."""
    growth_factor: float = 2.0
    """What the scale is multiplied with after ``growth_interval`` steps without an overflow."""
    backoff_factor: float = 0.5
    """What the scale is multiplied with after an overflow."""
    growth_interval: int = 2000
    """Steps without an overflow before the scale grows."""
    enabled: bool = True
    """Whether to scale at all."""


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Settings of ``torch.nn.parallel.DistributedDataParallel``, in which ``prepare`` wraps models.

    Raises:
        ConfigError: ``comm_hook`` or ``comm_wrapper`` is unknown.

    Example:
        >>> from notebook_accel import Accelerator, DistributedDataParallelKwargs
        >>> options = DistributedDataParallelKwargs(find_unused_parameters=True)
        >>> accelerator = Accelerator(kwargs_handlers=[options])
    """

    dim: int = 0
    """Dimension of the batch."""
    broadcast_buffers: bool = True
    """Whether rank 0's buffers are sent to all at each forward."""
    bucket_cap_mb: int = 25
    """Size, in MiB, of the buckets in which gradients travel."""
    find_unused_parameters: bool = False
    """Whether to look, after each forward, for parameters that took no part in it."""
    check_reduction: bool = False
    """Accepted; torch no longer uses it."""
    gradient_as_bucket_view: bool = False
    """Whether gradients live in the buckets: less memory."""
    static_graph: bool = False
    """Whether each step uses the same parameters."""
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """How gradients are compressed."""
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """fp16 or bf16: what the compression itself computes in."""
    comm_state_option: dict[str, Any] = field(default_factory=dict)
    """Arguments of PowerSGD's state, such as ``matrix_approximation_rank``."""

    def __post_init__(self) -> None:
        kinds, halves = DDPCommunicationHookType, ["no", "fp16", "bf16"]
        for name, allowed in (("comm_hook", kinds.list()), ("comm_wrapper", halves)):
            setattr(self, name, kinds(as_choice(name, getattr(self, name), allowed)))

    def to_dict(
        self, ignore_keys: Iterable[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the arguments of ``DistributedDataParallel``: all fields but ``ignore_keys``.

        By default the fields of the communication hook are left out, since
        :meth:`register_comm_hook` uses them.
        """
        ignored = set(ignore_keys)
        return {name: value for name, value in super().to_dict().items() if name not in ignored}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register ``comm_hook`` on a wrapped model to compress its gradients, unless it is "no".

        ``prepare`` calls it for each model that it wraps.
        """
        kinds = DDPCommunicationHookType
        if self.comm_hook == kinds.NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        state: Any = None
        if self.comm_hook in (kinds.POWER_SGD, kinds.BATCHED_POWER_SGD):
            hook: Any = powerSGD_hook.powerSGD_hook
            if self.comm_hook == kinds.BATCHED_POWER_SGD:
                hook = powerSGD_hook.batched_powerSGD_hook
            state = powerSGD_hook.PowerSGDState(process_group=None, **self.comm_state_option)
        else:
            hook = getattr(default_hooks, f"{self.comm_hook}_compress_hook")
        if self.comm_wrapper != kinds.NO:
            hook = getattr(default_hooks, f"{self.comm_wrapper}_compress_wrapper")(hook)
        model.register_comm_hook(state, hook)


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Settings of the process group that ``Accelerator`` makes (``init_process_group`` of torch).

    Example:
        >>> from datetime import timedelta
        >>> from notebook_accel import Accelerator, InitProcessGroupKwargs
        >>> options = InitProcessGroupKwargs(timeout=timedelta(minutes=5))
        >>> accelerator = Accelerator(kwargs_handlers=[options])
    """

    backend: str | None = None
    """Such as "gloo"; None takes the device's own."""
    init_method: str | None = None
    """An URL such as ``file:///shared/meet``; None takes MASTER_ADDR and MASTER_PORT."""
    timeout: timedelta | None = None
    """How long a collective may take; None takes the backend's default."""


@dataclass
class ProfileKwargs(KwargsHandler):
    """Settings of ``accelerator.profile`` (``torch.profiler.profile``).

    Example:
        >>> from notebook_accel import Accelerator, ProfileKwargs
        >>> with Accelerator().profile(ProfileKwargs(record_shapes=True)) as profiler:
        ...     pass
    """

    activities: list[str] | None = None
    """Such as ["cpu", "cuda"]; None takes all that there are."""
    schedule_option: dict[str, int] | None = None
    """Arguments of ``torch.profiler.schedule``."""
    on_trace_ready: Callable[[Any], None] | None = None
    """Called with the profiler when a trace is ready."""
    record_shapes: bool = False
    """Whether to note the shapes of the operators' inputs."""
    profile_memory: bool = False
    """Whether to follow allocations."""
    with_stack: bool = False
    """Whether to note where in the source each operator was called."""
    with_flops: bool = False
    """Whether to estimate the operations of matrix products and convolutions."""
    with_modules: bool = False
    """Whether to note the module of each operator."""
    output_trace_dir: str | None = None
    """Folder for one ``profile_{rank}.json`` a rank, to open in a trace viewer."""

    def build(self) -> Profiler:
        """Return a profiler of torch with these settings, to be used in ``with``.

        Raises:
            ConfigError: torch does not know a name in ``activities``.
        """
        from torch import profiler

        members = profiler.ProfilerActivity.__members__
        kinds = {name.lower(): member for name, member in members.items()}
        activities = None
        if self.activities is not None:
            names = [as_choice("activities", name.lower(), [*kinds]) for name in self.activities]
            activities = [kinds[name] for name in names]
        schedule = None
        if self.schedule_option is not None:
            schedule = profiler.schedule(**self.schedule_option)
        fields = self.to_dict() | {"activities": activities, "schedule": schedule}
        del fields["schedule_option"], fields["output_trace_dir"]
        return profiler.profile(**fields)


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Settings of gradient accumulation: gradients of several batches are summed for one step.

    The batches between two optimizer steps are called a window. ``Accelerator.backward`` divides
    each loss by ``num_steps``, the number of batches of a full window.

    Raises:
        ConfigError: ``num_steps`` is no whole number of at least 1.

    Example:
        >>> from notebook_accel import Accelerator, GradientAccumulationPlugin
        >>> plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        >>> Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps
        4
    """

    num_steps: int = 1
    """Batches per window; None means 1."""
    adjust_scheduler: bool = True
    """Accepted; without effect, as in Accelerate: a prepared scheduler counts real steps alone."""
    sync_with_dataloader: bool = True
    """Whether the last batch of a loader ends a window that is still short."""
    sync_each_batch: bool = False
    """Whether ranks exchange gradients at every batch: slower, but needs less memory under FSDP."""

    def __post_init__(self) -> None:
        if self.num_steps is None:
            self.num_steps = 1
        self.num_steps = as_count("GradientAccumulationPlugin: num_steps", self.num_steps)


@dataclass
class DataLoaderConfiguration:
    """Settings of prepared DataLoaders: how their batches are divided, ordered and copied.

    Raises:
        ConfigError: a setting has a wrong type.

    Example:
        >>> from notebook_accel import Accelerator, DataLoaderConfiguration
        >>> config = DataLoaderConfiguration(split_batches=True)
        >>> Accelerator(dataloader_config=config).split_batches
        True
    """

    split_batches: bool = False
    """True: each batch of the loader is divided over the ranks, so that its batch size is that
    of all ranks together. False: each rank gets whole batches."""

    dispatch_batches: bool | None = None
    """True: rank 0 alone reads the data and sends each rank its part. None: so for iterable
    datasets whose batches are put on the device."""

    even_batches: bool = True
    """True: the end of the data is filled up with samples from its start, so that every rank
    gets as many batches of the same size. What rank 0 dispatches always is. A stream that divides
    itself (by a method ``shard``, as Hugging Face's do) is left to do so where each rank gets the
    same number of shards; a rank then has the samples of its shards, which may be more or fewer
    than another's."""

    use_seedable_sampler: bool = False
    """True: the order of an epoch depends on the seed and the number of the epoch alone."""

    data_seed: int | None = None
    """Seed of the order; None takes that of the random numbers on rank 0."""

    non_blocking: bool = False
    """True: a batch in pinned memory is copied to the device while the CPU continues. The copy is
    queued behind the step before it, on the same stream."""

    use_stateful_dataloader: bool = False
    """True: prepared loaders are torchdata's ``StatefulDataLoader`` too, so that a dataset with
    ``state_dict`` and ``load_state_dict`` goes on where it was without reading what came before.
    Without it, prepared loaders have a ``state_dict`` too, which counts batches."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value, kind = getattr(self, each.name), int if each.name == "data_seed" else bool
            if value is not each.default and not isinstance(value, kind):
                raise ConfigError(f"{each.name}={value!r}: expected {kind.__name__}")


@dataclass
class ProjectConfiguration:
    """Folders of a project and names of its checkpoints, for ``Accelerator(project_config=...)``.

    Raises:
        ConfigError: ``total_limit`` is no whole number of at least 1.

    Example:
        >>> import tempfile
        >>> from notebook_accel import Accelerator, ProjectConfiguration
        >>> project = ProjectConfiguration(
        ...     tempfile.mkdtemp(), automatic_checkpoint_naming=True, total_limit=3
        ... )
        >>> folder = Accelerator(project_config=project).save_state()
        >>> folder.endswith("checkpoints/checkpoint_0")
        True
    """

    project_dir: str | None = None
    """Folder of the project."""
    logging_dir: str | None = None
    """Folder for what trackers write; None takes ``project_dir``."""
    automatic_checkpoint_naming: bool = False
    """Whether checkpoints are numbered, in ``project_dir/checkpoints/checkpoint_{n}``."""
    total_limit: int | None = None
    """How many numbered checkpoints are kept; None keeps all."""
    iteration: int = 0
    """The least number for the next checkpoint."""
    save_on_each_node: bool = False
    """Whether each machine writes what rank 0 writes: for machines without a shared disk."""

    def __post_init__(self) -> None:
        if self.logging_dir is None:
            self.logging_dir = self.project_dir
        if self.total_limit is not None:
            as_count("ProjectConfiguration: total_limit", self.total_limit)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set ``project_dir``; if ``logging_dir`` is None, set it to the same folder."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


class StrategyPlugin:
    """Base class of the settings by which a user chooses a strategy (a kind of parallelism).

    A strategy is the class that does one kind of parallelism, such as FSDP or DeepSpeed::

        argument, or environment variable --resolve--> plugin --> Request.plugins --> strategy

    The table ``PLUGIN_ARGUMENTS`` of ``strategies/__init__.py`` has the plugin classes by their
    arguments of ``Accelerator``.
    """

    switch: ClassVar[str]
    composes: ClassVar[bool] = True
    divides_layers: bool = False

    @classmethod
    def resolve(cls, argument: str, given: Any) -> StrategyPlugin | None:
        """Return the plugin that was given; else a default one if ``switch`` is true, else None.

        Args:
            argument: name of the argument of ``Accelerator``, for error messages.
            given: value of that argument; None if the user gave none.

        Raises:
            ConfigError: an object of another class was given.
        """
        if given is None:
            return cls() if environment.read_flag(cls.switch) else None
        if not isinstance(given, cls):
            raise ConfigError(f"{argument} is a {type(given).__name__}: expected a {cls.__name__}")
        return given

    def check_ranks(
        self, plugins: Mapping[str, Any], num_processes: int, local_num_processes: int
    ) -> None:
        """Raise if these settings cannot use this number of ranks; the base class accepts any.

        It is called before ranks connect, so that each rank fails and none waits for another.

        Args:
            plugins: all plugins in use, by the names of their arguments.
            num_processes: number of ranks.
            local_num_processes: number of ranks of this machine.

        Raises:
            ConfigError: the number of ranks does not fit the settings.
        """

    def resolve_precision(self, asked: str | None) -> str | None:
        """Return the mixed precision to use; the base class returns ``asked``.

        Args:
            asked: the ``mixed_precision`` of ``Accelerator``; None if the user gave none.
        """
        return asked

    def resolve_steps(self, asked: int | None) -> int | None:
        """Return the batches per optimizer step; the base class returns ``asked``.

        Args:
            asked: the ``gradient_accumulation_steps`` of ``Accelerator``; None if the user gave
                none.
        """
        return asked


_Handler = TypeVar("_Handler", bound=KwargsHandler)


def pick_handler(handlers: Iterable[KwargsHandler], kind: type[_Handler]) -> _Handler:
    """Return the first handler of class ``kind``; if there is none, a ``kind`` with defaults."""
    picked = next((handler for handler in handlers if isinstance(handler, kind)), None)
    return picked or kind()
