"""The settings of a launch: one dataclass, where its values come from, and its YAML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Union

import platformdirs
import yaml

from notebook_accel.errors import ConfigError

__all__ = ["ENGINES", "PRECISIONS", "LaunchConfig", "default_config_path", "resolve"]

ENGINES = ("auto", "local", "inline")
PRECISIONS = ("no", "bf16", "fp16")
_BACKENDS = ("nccl", "gloo")

DevicesLike = Union[Sequence[int], str, None]

# Accelerate's own name of a setting in its YAML, where it differs from ours.
_ACCELERATE_NAMES = {"main_process_port": "use_port", "gpu_ids": "devices"}


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

    devices: tuple[int, ...] | str | None = None
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
        _check_positive_int("num_processes", self.num_processes)
        _check_choice("mixed_precision", self.mixed_precision, PRECISIONS, optional=True)
        _check_choice("engine", self.engine, ENGINES)
        _check_choice("backend", self.backend, _BACKENDS, optional=True)
        _check_port(self.use_port)
        _check_env(self.env)
        if not isinstance(self.grace, (int, float)) or self.grace < 0:
            raise ConfigError(f"grace={self.grace!r}: expected seconds, 0 or more")
        object.__setattr__(self, "devices", _as_devices(self.devices))
        self._check_together()

    def _check_together(self) -> None:
        wanted = self.num_processes
        if self.engine == "inline" and wanted not in (None, 1):
            raise ConfigError(
                f"engine='inline' runs in the notebook's own process, so num_processes={wanted} "
                "cannot be had: leave it out, or take engine='local'"
            )
        if isinstance(self.devices, tuple) and wanted is not None and self.backend != "gloo":
            _check_enough(wanted, len(self.devices), f"devices={list(self.devices)}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LaunchConfig:
        """Read a YAML file, ours or one that ``accelerate config`` wrote.

        Raises:
            ConfigError: the file is not there, is no mapping, or holds what we cannot use.
        """
        try:
            data = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"config file {os.fspath(path)!r} cannot be read: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(
                f"config file {os.fspath(path)!r} holds a {type(data).__name__}; "
                "expected settings, one `name: value` a line"
            )
        is_accelerates = "compute_environment" in data or "distributed_type" in data
        return _from_accelerate(data) if is_accelerates else _from_mapping(data, str(path))

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
    layers = [_saved(notices), _from_environment(os.environ), _as_mapping(config)]
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer)
    merged.update({name: value for name, value in arguments.items() if value is not None})
    return _from_mapping(merged, "config="), notices


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


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    precision = environment.get("ACCELERATE_MIXED_PRECISION")
    if precision:
        found["mixed_precision"] = precision
    for name in ("num_processes", "mixed_precision", "engine", "devices", "backend", "grace"):
        text = environment.get(f"NOTEBOOK_ACCEL_{name.upper()}")
        if text:
            found[name] = text
    for name, convert in (("num_processes", int), ("grace", float)):
        if name in found:
            found[name] = _converted(name, found[name], convert)
    return found


def _converted(name: str, text: str, convert: type[int | float]) -> int | float:
    try:
        return convert(text)
    except ValueError:
        variable = f"NOTEBOOK_ACCEL_{name.upper()}"
        raise ConfigError(f"{variable}={text!r} in the environment: expected a number") from None


def _from_mapping(data: Mapping[str, Any], where: str) -> LaunchConfig:
    known = [field.name for field in fields(LaunchConfig)]
    unknown = [name for name in data if name not in known]
    if unknown:
        raise ConfigError(
            f"{where}: no setting is called {', '.join(map(repr, unknown))}; "
            f"there are {', '.join(known)}"
        )
    return replace(LaunchConfig(), **dict(data))


def _from_accelerate(data: Mapping[str, Any]) -> LaunchConfig:
    """What of ``accelerate config``'s YAML a launch here can use."""
    found: dict[str, Any] = {}
    for name in ("num_processes", "mixed_precision", "debug", "main_process_port", "gpu_ids"):
        value = data.get(name)
        if value not in (None, "all"):
            found[_ACCELERATE_NAMES.get(name, name)] = value
    if data.get("use_cpu"):
        found["devices"] = "cpu"
    return _from_mapping(found, "accelerate's config file")


def _check_positive_int(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: expected a whole number, 1 or more")


def _check_choice(name: str, value: Any, choices: Sequence[str], *, optional: bool = False) -> None:
    if value in choices or (optional and value is None):
        return
    raise ConfigError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def _check_port(value: Any) -> None:
    if value is not None and (not isinstance(value, int) or not 0 < value < 65_536):
        raise ConfigError(f"use_port={value!r}: expected None (a free port) or 1 to 65535")


def _check_env(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(text, str) for name, text in value.items()
    ):
        raise ConfigError(f"env={value!r}: expected a mapping of names to texts")


def _as_devices(value: Any) -> tuple[int, ...] | str | None:
    if value is None:
        return None
    if value == "cpu":
        return "cpu"
    parts = value.split(",") if isinstance(value, str) else value
    try:
        devices = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        devices = ()
    if not devices or min(devices) < 0 or len(set(devices)) < len(devices):
        raise ConfigError(f"devices={value!r}: expected 'cpu', or different indices such as [0, 2]")
    return devices


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
