"""The settings of a launch: one dataclass, where its values come from, and its YAML."""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import platformdirs
import yaml

from notebook_accel.errors import ConfigError

__all__ = ["ENGINES", "PRECISIONS", "LaunchConfig", "default_config_path", "resolve"]

ENGINES = ("auto", "local", "inline")
PRECISIONS = ("no", "bf16", "fp16")
_BACKENDS = ("nccl", "gloo")

# What of Accelerate's YAML a launch uses, by our names.
_ACCELERATE_NAMES = {
    "num_processes": "num_processes",
    "mixed_precision": "mixed_precision",
    "debug": "debug",
    "main_process_port": "use_port",
    "gpu_ids": "devices",
}
# Values of that file for which something is needed that there is not.
_ACCELERATE_ABSENT = {
    "distributed_type": ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TPU"),
}
_ACCELERATE_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "debug": "ACCELERATE_DEBUG_MODE",
    "devices": "ACCELERATE_USE_CPU",
}
_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on", "y", "t"), True),
    **dict.fromkeys(("0", "false", "no", "off", "n", "f"), False),
}


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How a run is launched; checked at construction.

    Raises:
        ConfigError: a setting that makes no sense, alone or with another.
    """

    num_processes: int | None = None
    """Number of ranks; None: one a visible accelerator, 1 on a machine with none."""

    mixed_precision: str | None = None
    """"no", "bf16" or "fp16", for every ``Accelerator`` that does not say its own."""

    engine: str = "auto"
    """"auto", "local" (processes of this machine) or "inline" (in the kernel, for a debugger)."""

    devices: Sequence[int] | str | None = None
    """Indices of the accelerators to use, one rank each, or "cpu"; None: all that are visible."""

    backend: str | None = None
    """torch.distributed backend of the ranks; "gloo" lets several ranks share an accelerator."""

    use_port: int | None = None
    """MASTER_PORT of the ranks; None takes a free one."""

    env: Mapping[str, str] | None = None
    """Environment variables of the ranks, beside those of the notebook."""

    grace: float = 10.0
    """Seconds that the handlers of an interrupt get before the ranks are terminated."""

    debug: bool = False
    """Check the shapes of every collective across ranks, and have torch explain mismatches."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_processes", _as_count("num_processes", self.num_processes))
        _check_choice("mixed_precision", self.mixed_precision, PRECISIONS, optional=True)
        _check_choice("engine", self.engine, ENGINES)
        _check_choice("backend", self.backend, _BACKENDS, optional=True)
        _check_port(self.use_port)
        _check_env(self.env)
        _check_seconds("grace", self.grace)
        if not isinstance(self.debug, bool):
            raise ConfigError(f"debug={self.debug!r}: expected True or False")
        object.__setattr__(self, "env", None if self.env is None else dict(self.env))
        object.__setattr__(self, "devices", _as_devices(self.devices))
        self._check_together()

    def _check_together(self) -> None:
        wanted = self.num_processes
        if self.engine == "inline" and wanted not in (None, 1):
            raise ConfigError(
                f"engine='inline' runs in the notebook's own process, so num_processes={wanted} "
                "cannot be had: leave it out, or take engine='local'"
            )
        if self.devices == "cpu" and self.backend == "nccl":
            raise ConfigError("backend='nccl' needs GPUs: with devices='cpu' take 'gloo'")
        if isinstance(self.devices, tuple) and wanted is not None and self.backend != "gloo":
            _check_enough(wanted, len(self.devices), f"devices={list(self.devices)}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LaunchConfig:
        """Read a YAML file, ours or one that ``accelerate config`` wrote.

        Raises:
            ConfigError: the file is not there, is no mapping, or holds what we cannot use.
        """
        try:
            return _from_file(_read(path))
        except ConfigError as error:
            raise ConfigError(f"config file {os.fspath(path)!r}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings that differ from the defaults as YAML."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False))

    def to_dict(self) -> dict[str, Any]:
        """The settings that differ from the defaults, as plain values."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        default = {field.name: field.default for field in fields(self)}
        plain = {name: _plain(value) for name, value in given.items()}
        return {name: value for name, value in plain.items() if given[name] != default[name]}


def default_config_path() -> Path:
    """The file of settings that every launch uses, where one was saved."""
    return Path(platformdirs.user_config_dir("notebook-accel")) / "config.yaml"


def resolve(
    arguments: Mapping[str, Any],
    config: LaunchConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[LaunchConfig, list[str]]:
    """The settings of a launch, and lines for the person about where they came from.

    First found wins: an argument that is not None, ``config``, the environment
    (``NOTEBOOK_ACCEL_*``, then ``ACCELERATE_*``), the default config file, the default.

    Raises:
        ConfigError: a setting that makes no sense, or a name that is none.
    """
    notices: list[str] = []
    given = _as_mapping(config)
    given.update({name: value for name, value in arguments.items() if value is not None})
    found = {**_saved(notices), **_from_environment(os.environ, but=given), **given}
    return _from_mapping(found), notices


def check_enough_devices(wanted: int, available: int) -> None:
    """Refuse more ranks than accelerators.

    Raises:
        ConfigError: ``wanted`` is more than ``available``.
    """
    _check_enough(wanted, available, f"this machine has {available}")


def _check_enough(wanted: int, available: int, why: str) -> None:
    if wanted > available:
        raise ConfigError(
            f"num_processes={wanted}, but {why}: one accelerator a rank. Ask for "
            f"num_processes={available}, or for devices='cpu', or let ranks share accelerators "
            "with config=LaunchConfig(backend='gloo')"
        )


def _saved(notices: list[str]) -> dict[str, Any]:
    path = default_config_path()
    if not path.is_file():
        return {}
    notices.append(f"settings of {path} are used where the call gives none")
    return LaunchConfig.load(path).to_dict()


def _as_mapping(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, LaunchConfig):
        return config.to_dict()
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, (str, os.PathLike)):
        return LaunchConfig.load(config).to_dict()
    raise ConfigError(
        f"config={config!r}: expected a LaunchConfig, a mapping of its fields or a YAML file's path"
    )


def _from_environment(environment: Mapping[str, str], *, but: Mapping[str, Any]) -> dict[str, Any]:
    """What the environment says of the settings that nobody ``but`` it gives."""
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(LaunchConfig) if field.name not in ("env", *but)):
        variables = (f"NOTEBOOK_ACCEL_{name.upper()}", _ACCELERATE_VARIABLES.get(name, ""))
        variable = next((each for each in variables if environment.get(each)), None)
        if variable is not None:
            found.update(_from_variable(name, variable, environment[variable]))
    return found


def _from_variable(name: str, variable: str, text: str) -> dict[str, Any]:
    if variable == "ACCELERATE_USE_CPU":
        return {"devices": "cpu"} if _FLAGS.get(text.lower()) else {}
    value: Any = text
    with contextlib.suppress(ValueError, KeyError):
        value = _CONVERSIONS.get(name, str)(text)
    try:
        LaunchConfig(**{name: value})
    except ConfigError as error:
        raise ConfigError(f"{variable}={text!r} in the environment: {error}") from None
    return {name: value}


_CONVERSIONS: Mapping[str, Callable[[str], Any]] = {
    "num_processes": int,
    "use_port": int,
    "grace": float,
    "debug": lambda text: _FLAGS[text.lower()],
}


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"it cannot be read: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"it holds a {type(data).__name__}; expected settings, one `name: value` a line"
        )
    # YAML's `no`, without quotes, is False.
    return {**data, "mixed_precision": "no"} if data.get("mixed_precision") is False else data


def _from_file(data: Mapping[str, Any]) -> LaunchConfig:
    is_accelerates = "compute_environment" in data or "distributed_type" in data
    return _from_accelerate(data) if is_accelerates else _from_mapping(data)


def _from_mapping(data: Mapping[str, Any]) -> LaunchConfig:
    known = [field.name for field in fields(LaunchConfig)]
    unknown = [name for name in data if name not in known]
    if unknown:
        raise ConfigError(
            f"no setting is called {', '.join(map(repr, unknown))}; there are {', '.join(known)}"
        )
    return LaunchConfig(**data)


def _from_accelerate(data: Mapping[str, Any]) -> LaunchConfig:
    """What of ``accelerate config``'s YAML a launch here can use."""
    absent = [
        f"{name}: {data[name]}"
        for name, values in _ACCELERATE_ABSENT.items()
        if data.get(name) in values
    ]
    if data.get("num_machines") not in (None, 1):
        absent.append(f"num_machines: {data['num_machines']}")
    if absent:
        raise ConfigError(
            f"{', '.join(absent)}: not supported yet; there is data-parallel training on the "
            "processors and GPUs of one machine"
        )
    found = {
        ours: data[theirs]
        for theirs, ours in _ACCELERATE_NAMES.items()
        if data.get(theirs) not in (None, "all")
    }
    return _from_mapping({**found, "devices": "cpu"} if data.get("use_cpu") else found)


def _as_count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    number = _as_index(value)
    if number is None or number < 1:
        raise ConfigError(f"{name}={value!r}: expected a whole number, 1 or more")
    return number


def _as_index(value: Any) -> int | None:
    """The whole number that ``value`` is (numpy's included), else None."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _check_seconds(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or value < 0:
        raise ConfigError(f"{name}={value!r}: expected seconds, 0 or more")


def _check_choice(name: str, value: Any, choices: Sequence[str], *, optional: bool = False) -> None:
    if value in choices or (optional and value is None):
        return
    raise ConfigError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def _check_port(value: Any) -> None:
    number = _as_index(value)
    if value is not None and (number is None or not 0 < number < 65_536):
        raise ConfigError(f"use_port={value!r}: expected None (a free port) or 1 to 65535")


def _check_env(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(text, str) for name, text in value.items()
    ):
        raise ConfigError(f"env={value!r}: expected a mapping of names to texts")
    if any(not name or "=" in name for name in value) or "\0" in "".join((*value, *value.values())):
        raise ConfigError(f"env={value!r}: expected names without '=', and no NUL character")


def _as_devices(value: Any) -> tuple[int, ...] | str | None:
    if value is None or (isinstance(value, str) and value == "cpu"):
        return value
    devices = _as_indices(value)
    if not devices or min(devices) < 0 or len(set(devices)) < len(devices):
        raise ConfigError(f"devices={value!r}: expected 'cpu', or different indices such as [0, 2]")
    return devices


def _as_indices(value: Any) -> tuple[int, ...]:
    """The whole numbers in ``value``; none where anything else is in it."""
    try:
        parts = [int(part) for part in value.split(",")] if isinstance(value, str) else list(value)
    except (TypeError, ValueError):
        return ()
    indices = [_as_index(part) for part in parts]
    return tuple(index for index in indices if index is not None) if None not in indices else ()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
