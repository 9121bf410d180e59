"""``LaunchConfig``: the settings of a launch, each declared once, as a field (see setting.py)."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import yaml

from notebook_accel.config import accelerate_yaml, checks
from notebook_accel.config.checks import shown
from notebook_accel.config.engines import ENGINES
from notebook_accel.config.file import expanded, read_settings, replace_text
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.config.setting import documented, setting, settings_of
from notebook_accel.errors import ConfigError

# Whether a backend of torch.distributed works on CPUs, and lets several ranks share an accelerator.
_BACKENDS = {"nccl": False, "gloo": True}


def _options(name: str) -> Any:
    plugin = PLUGINS[name]
    return setting(
        about=f"Fields of ``{plugin.plugin_class}``, for every ``Accelerator`` that is not given "
        "one; {} takes its defaults",
        check=lambda _, value: plugin.check(name, value),
    )


@documented
@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Settings of a launch, checked at construction.

    Pass it as ``notebook_launcher(..., config=...)``. Arguments of that call override the settings
    of the config.

    Raises:
        ConfigError: a setting is invalid, alone or together with another.

    Example:
        >>> from notebook_accel import LaunchConfig
        >>> config = LaunchConfig(num_processes=2, mixed_precision="bf16")
        >>> config.to_dict()
        {'num_processes': 2, 'mixed_precision': 'bf16'}
    """

    num_processes: int | None = setting(
        check=checks.as_count,
        label="Processes",
        is_first=True,
        about="Number of ranks, the processes that train; with ``num_nodes``, on each machine",
        unset="one for each accelerator, else 1",
        yaml="num_processes",
    )
    devices: Sequence[int] | str | None = setting(
        check=checks.as_devices,
        label="Devices",
        is_first=True,
        about='Indices of the accelerators to use, one rank each, or "cpu"',
        unset="all that are visible",
        variable="ACCELERATE_USE_CPU",
        yaml="gpu_ids",
    )
    mixed_precision: str | None = setting(
        choices=("no", "bf16", "fp16", "fp8"),
        label="Mixed precision",
        is_first=True,
        about='"no", "bf16", "fp16" or "fp8", for every ``Accelerator`` that does not say its own',
        unset="as the function says",
        variable="ACCELERATE_MIXED_PRECISION",
        yaml="mixed_precision",
        is_for_ranks=True,
    )
    engine: str = setting(
        "auto",
        choices=ENGINES,
        label="Engine",
        is_first=True,
        about="Where the ranks are: "
        + "; ".join(f'"{name}", {kind.about}' for name, kind in ENGINES.items()),
    )
    gradient_accumulation_steps: int | None = setting(
        check=checks.as_count,
        label="Accumulation",
        is_first=True,
        about="Batches whose gradients are added up for each step, for every ``Accelerator`` that "
        "does not say its own",
        unset="as the function says",
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        yaml="gradient_accumulation_steps",
        is_for_ranks=True,
    )
    seed: int | None = setting(
        check=partial(checks.as_count, least=0, most=2**63 - 1),
        label="Seed",
        is_first=True,
        about="Seed of the random numbers of Python, numpy and torch in every rank. With "
        'engine="inline" they are the notebook\'s own',
        unset="the notebook's random state",
    )
    backend: str | None = setting(
        choices=tuple(_BACKENDS),
        label="Backend",
        about='torch.distributed backend of the ranks; "gloo" lets several ranks share an '
        "accelerator",
        unset="the devices' own",
        is_for_ranks=True,
    )
    use_port: int | None = setting(
        check=partial(checks.as_count, most=65_535),
        label="Port",
        about="The port at which the ranks meet (MASTER_PORT). Ranks of a session meet at a free "
        "one after a call that failed: who is left of the group before may still use this port",
        unset="a free one",
        yaml="main_process_port",
    )
    num_nodes: int = setting(
        1,
        check=checks.as_count,
        label="Machines",
        about="Number of machines: this one, and those that join by the command that is shown",
        yaml="num_machines",
    )
    master_addr: str | None = setting(
        label="Address",
        check=checks.as_address,
        about="With ``num_nodes``: the address of this machine by which the others reach it",
        unset="that by which they join",
        yaml="main_process_ip",
    )
    max_restarts: int = setting(
        0,
        check=partial(checks.as_count, least=0),
        label="Restarts",
        about="How often the ranks are started again after a failure, on the machines that are "
        "left; a function that calls ``accelerator.resume_or_start`` goes on from its checkpoint",
    )
    grace: float = setting(
        10.0,
        check=checks.as_seconds,
        label="Grace, in seconds",
        about="Seconds that ranks get to leave: after a Stop that they do not hear until they are "
        "interrupted, and after an interrupt until they are terminated",
    )
    debug: bool = setting(
        False,
        label="Debug",
        about="Compare across ranks what the ``Accelerator``'s collectives are given (gather, "
        "reduce, broadcast). Torch's own mode, TORCH_DISTRIBUTED_DEBUG=DETAIL, is left out: it "
        "kills ranks that train by DDP on CPUs",
        variable="ACCELERATE_DEBUG_MODE",
        yaml="debug",
    )
    env: Mapping[str, str] | None = setting(
        check=checks.as_env,
        label="Environment",
        about="Environment variables of the ranks, beside those of the notebook. They may be "
        "secrets, and what is shown of the settings leaves them out",
        shows=False,
    )
    fsdp: Mapping[str, Any] | None = _options("fsdp")
    deepspeed: Mapping[str, Any] | None = _options("deepspeed")
    parallelism: Mapping[str, Any] | None = _options("parallelism")

    def __post_init__(self) -> None:
        for name, row in settings_of(LaunchConfig).items():
            object.__setattr__(self, name, row.checked(name, getattr(self, name)))
        if self.engine == "auto" and self._asked_of_engine:
            object.__setattr__(self, "engine", _engine_that_obeys(self._asked_of_engine))
        self._check_together()

    @property
    def _asked_of_engine(self) -> list[str]:
        some = dict.fromkeys(name for kind in ENGINES.values() for name in kind.obeys)
        return [name for name in some if getattr(self, name) != getattr(LaunchConfig, name)]

    def _check_together(self) -> None:
        wanted, kind = self.num_processes, ENGINES[self.engine]
        if wanted is not None and kind.max_ranks is not None and wanted > kind.max_ranks:
            raise ConfigError(
                f"engine={self.engine!r} has {kind.max_ranks} rank{'s' * (kind.max_ranks > 1)}, so "
                f"num_processes={wanted} cannot be had: leave it out, or take engine='local'"
            )
        for name in self._asked_of_engine:
            if name not in kind.obeys:
                raise ConfigError(
                    f"{name}={getattr(self, name)} with engine={self.engine!r} ({kind.about}): "
                    f"leave it out, or leave the engine out: engine={_engine_that_obeys([name])!r} "
                    "is taken then"
                )
        asked = [name for name in PLUGINS if getattr(self, name) is not None]
        if len(asked) > 1 and not all(PLUGINS[name].composes for name in asked):
            raise ConfigError(f"{' and '.join(asked)} were given, which do not compose: pass one")
        if self.devices == "cpu" and not _BACKENDS.get(self.backend or "gloo"):
            raise ConfigError(
                f"backend={self.backend!r} needs GPUs: with devices='cpu' take 'gloo'"
            )
        if isinstance(self.devices, tuple) and wanted is not None and not shares_devices(self):
            checks.check_enough(wanted, len(self.devices), f"devices={list(self.devices)}")
        # How many more there may be, a plugin that the function makes can say.
        num_divided = math.prod((self.parallelism or {}).values())
        num_ranks = None if wanted is None else wanted * self.num_nodes
        if num_ranks is not None and num_ranks % num_divided:
            raise ConfigError(
                f"parallelism={self.parallelism} takes {num_divided} ranks, and num_processes="
                f"{wanted}: make num_processes that, or a multiple of it"
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LaunchConfig:
        """Read the settings from a YAML file, written by this package or by ``accelerate config``.

        A warning names the entries of Accelerate's file that have no effect here.

        Args:
            path: the file.

        Raises:
            ConfigError: the file is missing, contains no mapping, or has an invalid setting.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "launch.yaml")
            >>> config.save(path)
            >>> LaunchConfig.load(path) == config
            True
        """
        settings, notices = settings_in_file(path)
        for notice in notices:
            warnings.warn(notice, stacklevel=2)
        return cls(**settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings that differ from the defaults to a YAML file.

        Missing folders are made. An existing file is replaced atomically and keeps its mode; if the
        new content cannot be written, the file is unchanged.

        Args:
            path: the file.

        Raises:
            ConfigError: the path begins with "~", and that home folder is unknown.
            OSError: the file cannot be written.
        """
        file = expanded(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.is_file():
            # A device or a pipe must not become a file.
            file.write_text(self.to_yaml(), encoding="utf-8")
        else:
            # A link stays: what it leads to is replaced.
            replace_text(file.resolve(), self.to_yaml())

    def to_yaml(self) -> str:
        """Return the settings that differ from the defaults as YAML.

        Example:
            >>> print(config.to_yaml())
            num_processes: 2
            mixed_precision: bf16
        """
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults; tuples become lists, as in YAML.

        Example:
            >>> config.to_dict()
            {'num_processes': 2, 'mixed_precision': 'bf16'}
        """
        given = ((field, getattr(self, field.name)) for field in fields(self))
        # YAML has lists, and no tuples.
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field, value in given
            if value != field.default
        }


def _engine_that_obeys(names: Sequence[str]) -> str:
    return next(name for name, kind in ENGINES.items() if {*names} <= {*kind.obeys})


def shares_devices(config: LaunchConfig) -> bool:
    """Return whether a launch's backend lets several ranks share an accelerator ("gloo" does)."""
    return _BACKENDS.get(config.backend or "", False)


def settings_in_file(
    path: str | os.PathLike[str], taken_out: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return the checked settings, and lines about unused entries; ConfigError as ``load``.

    ``taken_out`` has, as keys, entries of Accelerate's file that the caller handles: it gets their
    values, None for absent ones.
    """
    name = f"config file {os.fspath(path)!r}"
    not_used: list[str] = []
    try:
        data = read_settings(expanded(path))
        if "compute_environment" in data or "distributed_type" in data:  # it is Accelerate's
            if taken_out is not None:
                taken_out |= {entry: data.pop(entry, None) for entry in taken_out}
            data, not_used = accelerate_yaml.settings_from(data, settings_of(LaunchConfig))
        check_names(data)
        LaunchConfig(**data)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return data, [f"{name}: {line}" for line in not_used]


def check_names(data: Mapping[Any, Any]) -> None:
    """Raise ConfigError if keys are no settings, with the first five."""
    known = [field.name for field in fields(LaunchConfig)]
    unknown = [name for name in data if name not in known]
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ConfigError(
            f"no setting is called {', '.join(map(shown, unknown[:5]))}{more}; "
            f"there are {', '.join(known)}"
        )
