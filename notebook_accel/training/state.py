"""``PartialState`` and ``AcceleratorState``: views of this rank and of its settings.

As in Hugging Face Accelerate, all instances of a class show the same data, which is kept once per
rank. The third such class, ``GradientState``, is in ``stepping``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from notebook_accel.config.checks import parse_flag
from notebook_accel.errors import ConfigError
from notebook_accel.rank.this_rank import current
from notebook_accel.training.collectives import is_debugging, set_debugging
from notebook_accel.training.precision import resolve_precision
from notebook_accel.training.processes import ProcessInfo, devices, topology
from notebook_accel.training.processes.process_group import close_process_group
from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.settings.handlers import DistributedType, InitProcessGroupKwargs
from notebook_accel.training.settings.parallelism import ParallelismConfig
from notebook_accel.training.strategies.base import Strategy
from notebook_accel.training.strategies.compiling import TorchDynamoPlugin
from notebook_accel.training.strategies.deepspeed_plugin import DeepSpeedPlugin


class _SharedState:
    """Descriptor that gives the properties of a state class as a dictionary, by name.

    It stands for Accelerate's ``_shared_state`` and ``state.__dict__``. Scripts read these to
    record the setup of a run, and to find out whether the state was initialized: before that the
    dictionary is empty.
    """

    def __init__(self, is_made: Callable[[], bool]) -> None:
        self._is_made = is_made

    def __get__(self, instance: object, owner: type) -> dict[str, Any]:
        if not self._is_made():
            return {}
        state: Any = object.__new__(owner)  # states hold nothing, so that any of them tells it
        members = {name: kind for each in owner.__mro__ for name, kind in vars(each).items()}
        properties = [name for name, kind in members.items() if isinstance(kind, property)]
        return {name: getattr(state, name) for name in properties if name[0] != "_"}


class PartialState(ProcessInfo):
    """Rank, number of ranks and device of this process, and helpers for work between the ranks.

    All instances in a rank show the same state. The members that are inherited from ``ProcessInfo``
    are also those of an ``Accelerator``.

    Example:
        >>> from notebook_accel import PartialState
        >>> state = PartialState()
        >>> state.process_index, state.num_processes
        (0, 1)
    """

    _shared_state = _SharedState(topology.is_established)

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        """Make the process group if there are several ranks and no process group yet.

        All ranks then make their ``PartialState`` together. The arguments have an effect only in
        the first ``PartialState`` or ``Accelerator`` of this rank.

        Args:
            cpu: compute on the CPU even if there is an accelerator.
            **kwargs: fields of :class:`InitProcessGroupKwargs`.
        """
        topology.establish(cpu=cpu, options=InitProcessGroupKwargs(**kwargs))

    @property
    def backend(self) -> str | None:
        """The process group's backend for this device, such as "gloo"; None without a group."""
        return topology.topology().backend

    @property
    def initialized(self) -> bool:
        """Always True, as in Accelerate: a ``PartialState`` is initialized when it is made."""
        return True

    @property
    def debug(self) -> bool:
        """Whether debug mode is on; may be set, by all ranks at the same point of the program.

        In debug mode each collective first compares the shapes and types that the ranks pass, and
        raises if they do not match. The environment variable ``ACCELERATE_DEBUG_MODE`` sets the
        initial value.
        """
        return is_debugging()

    @debug.setter
    def debug(self, value: bool) -> None:
        set_debugging(bool(value))

    @property
    def default_device(self) -> torch.device:
        """The type of device that this machine's ranks use by default, as a ``torch.device``."""
        return torch.accelerator.current_accelerator(check_available=True) or devices.HOST

    @property
    def fork_launched(self) -> bool:
        """Whether Accelerate's launcher forked this process (environment: ``FORK_LAUNCHED``)."""
        return parse_flag("FORK_LAUNCHED", os.environ.get("FORK_LAUNCHED", "0"))

    def set_device(self) -> None:
        """Determine this rank's device and make the process group, unless that has been done.

        The device cannot be chosen here: the first ``PartialState`` or ``Accelerator`` chooses it.
        """
        topology.topology()

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        """Destroy a process group; all its ranks call it.

        Args:
            group: the group. None: the default group, if this package made it; a default group
                that other code made is left alone.
        """
        close_process_group(group)

    def __repr__(self) -> str:
        here = topology.topology()
        return (
            f"Distributed environment: {self.distributed_type}"
            f"{f'  Backend: {here.backend}' if here.backend else ''}\n"
            f"Num processes: {here.num_processes}\n"
            f"Process index: {here.process_index}\n"
            f"Local process index: {here.local_process_index}\n"
            f"Device: {here.device}\n"
        )

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return self._shared_state

    def __getstate__(self) -> None:
        """Return None: pickles hold no state. An unpickled object shows its new process's state."""

    @staticmethod
    def _reset_state() -> None:
        current().shared.pop(topology.Topology, None)
        set_debugging(None)


@dataclass(frozen=True)
class AcceleratorSettings:
    """Settings with which this rank's newest ``Accelerator`` was made.

    The ``Accelerator`` makes this object, and ``AcceleratorState`` shows it. ``strategy`` is None
    before there is an ``Accelerator``.
    """

    mixed_precision: str
    strategy: Strategy | None = None

    @property
    def plugins(self) -> Mapping[str, Any]:
        """The plugins in use, by the argument of ``Accelerator``, such as "fsdp_plugin"."""
        return self.strategy.request.plugins if self.strategy else {}


def newest_settings() -> AcceleratorSettings:
    """Return the settings with which this rank's newest ``Accelerator`` was made.

    Raises:
        AttributeError: this rank has made no ``Accelerator``, or has called
            ``AcceleratorState._reset_state()`` since.
    """
    settings: AcceleratorSettings | None = current().shared.get(AcceleratorSettings)
    if settings is None:
        raise AttributeError(
            "`AcceleratorState` object has no attribute to show. This happens if "
            "`AcceleratorState._reset_state()` was called: make a new Accelerator after it"
        )
    return settings


class TrainingInfo(ProcessInfo):
    """Base of ``AcceleratorState`` and ``Accelerator``: how an ``Accelerator`` trains."""

    @property
    def _settings(self) -> AcceleratorSettings:
        return newest_settings()

    @property
    def mixed_precision(self) -> str:
        """Name of the precision: "no", "bf16", "fp16" or "fp8"."""
        return self._settings.mixed_precision

    @property
    def distributed_type(self) -> DistributedType:
        """How the ranks train together, such as ``DistributedType.MULTI_CPU``."""
        strategy = self._settings.strategy
        return (strategy and strategy.distributed_type) or super().distributed_type

    @property
    def is_fsdp2(self) -> bool:
        """Whether weights are sharded by FSDP, which here is always ``fully_shard`` (FSDP2)."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """Number of ranks for each kind of parallelism (data, tensor, pipeline, context).

        None if neither ``parallelism_config`` nor a plugin set it.
        """
        return one.parallelism if (one := self._settings.strategy) else None

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The DeepSpeed plugin in use; None without DeepSpeed."""
        return self._settings.plugins.get("deepspeed_plugin")


class AcceleratorState(TrainingInfo, PartialState):
    """``PartialState`` with the settings of the newest ``Accelerator`` of this rank.

    Example:
        >>> from notebook_accel import Accelerator, AcceleratorState
        >>> accelerator = Accelerator(mixed_precision="bf16")
        >>> AcceleratorState().mixed_precision
        'bf16'
    """

    _shared_state = _SharedState(lambda: AcceleratorSettings in current().shared)

    torch_tp_plugin: None = None  # ``parallelism_config`` asks for tensor parallelism
    megatron_lm_plugin: None = None  # Megatron-LM is not supported

    def __init__(
        self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any
    ) -> None:
        """Show the newest ``Accelerator``'s settings; make the process group if there is none.

        Args:
            mixed_precision: the precision that all instances show from now on, in place of the
                Accelerator's: "no", "bf16", "fp16" or "fp8". It does not change how models compute.
                None changes nothing.
            cpu: compute on the CPU even if there is an accelerator. It has an effect only if this
                is the first state or ``Accelerator`` of this rank.
            **kwargs: plugins (``dynamo_plugin``, ``fsdp_plugin``, ``deepspeed_plugin``,
                ``torch_tp_plugin``, ``megatron_lm_plugin``, ``parallelism_config``), accepted if
                the newest ``Accelerator`` has the same object; and fields of
                :class:`InitProcessGroupKwargs`.

        Raises:
            ConfigError: the newest ``Accelerator`` was not made with this plugin.
        """
        shown = self if is_initialized() else None
        for name in [name for name in kwargs if name.endswith(("plugin", "config"))]:
            plugin = kwargs.pop(name)
            if plugin is not None and plugin is not getattr(shown, name, None):
                raise ConfigError(
                    f"AcceleratorState({name}=...) shows what an Accelerator trains by, and there "
                    f"is none with this one: make Accelerator({name}=...)"
                )
        super().__init__(cpu=cpu, **kwargs)
        shared = current().shared
        if AcceleratorSettings not in shared:
            shared[AcceleratorSettings] = AcceleratorSettings(resolve_precision(mixed_precision))
        elif mixed_precision is not None:
            own = replace(self._settings, mixed_precision=resolve_precision(mixed_precision))
            shared[AcceleratorSettings] = own

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """The FSDP plugin in use, from the argument or the environment; None without FSDP."""
        return self._settings.plugins.get("fsdp_plugin")

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Device mesh of the ranks; None without ``parallelism_config`` or a sharding plugin."""
        return one.mesh if (one := self._settings.strategy) else None

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """Settings of ``torch.compile``; the backend is "NO" if models are not compiled."""
        strategy = self._settings.strategy
        return strategy.request.dynamo if strategy else TorchDynamoPlugin()

    @property
    def deepspeed_plugins(self) -> dict[str, DeepSpeedPlugin] | None:
        """``{"default": plugin}`` with the DeepSpeed plugin in use; None without DeepSpeed.

        Accelerate may hold several plugins by name; here the dictionary has the active one alone.
        """
        return None if self.deepspeed_plugin is None else {"default": self.deepspeed_plugin}

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        current().shared.pop(AcceleratorSettings, None)
        if reset_partial_state:
            PartialState._reset_state()


def get_active_deepspeed_plugin(state: AcceleratorState) -> DeepSpeedPlugin:
    """Return the DeepSpeed plugin in use.

    Args:
        state: any ``AcceleratorState``.

    Raises:
        ConfigError: this rank's newest ``Accelerator`` was made without a DeepSpeed plugin.
    """
    if state.deepspeed_plugin is None:
        raise ConfigError("there is no DeepSpeedPlugin: make Accelerator(deepspeed_plugin=...)")
    return state.deepspeed_plugin


def is_initialized() -> bool:
    """Return whether this rank has made an ``Accelerator`` or an ``AcceleratorState``.

    After ``AcceleratorState._reset_state()`` the result is False again.
    """
    return AcceleratorSettings in current().shared
