"""The settings of a launch: one dataclass, where its values come from, and its YAML.

    argument > config= > NOTEBOOK_ACCEL_* > ACCELERATE_* > default config file > default

:func:`resolve` takes each setting from the first of these that gives it. An argument, a mapping
and a YAML file give what is written in them, also where that is the default; a ``LaunchConfig``
gives what differs from the defaults, since it cannot tell what was written.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import platformdirs
import yaml

from notebook_accel.errors import ConfigError
from notebook_accel.plugin_options import PLUGINS
from notebook_accel.text_values import parse_flag, shown, value_of

if TYPE_CHECKING:
    from notebook_accel.launch.engines.base import Engine

__all__ = [
    "LaunchConfig",
    "check_enough_devices",
    "check_seconds",
    "choices_of",
    "default_config_path",
    "descriptions",
    "given_settings",
    "resolve",
    "value_of_text",
    "write_basic_config",
]

_PRECISIONS = ("no", "bf16", "fp16", "fp8")
# Name of each backend, and whether it works on a CPU.
_BACKENDS = {"nccl": False, "gloo": True}

# What of Accelerate's YAML a launch uses, by our names.
_ACCELERATE_NAMES = {
    "num_processes": "num_processes",
    "mixed_precision": "mixed_precision",
    "debug": "debug",
    "main_process_port": "use_port",
    "gpu_ids": "devices",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
# Values in that file that ask for what this package does not have.
_ACCELERATE_ABSENT = {
    "distributed_type": ("MEGATRON_LM", "XLA", "TPU"),
}
# What its distributed_type means where the section that says more is left out.
_ACCELERATE_TYPES = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}
_ACCELERATE_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "debug": "ACCELERATE_DEBUG_MODE",
    "devices": "ACCELERATE_USE_CPU",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}
# A mapping is no text: what these carry has variables of its own, which reach the ranks by
# themselves.
_NO_VARIABLE = ("env", *PLUGINS)


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How a run is launched; checked at construction.

    Raises:
        ConfigError: a setting that makes no sense, alone or with another.
    """

    num_processes: int | None = None
    """Number of ranks; None: one a visible accelerator, 1 on a machine with none."""

    mixed_precision: str | None = None
    """"no", "bf16", "fp16" or "fp8", for every ``Accelerator`` that does not say its own."""

    engine: str = "auto"
    """"auto", "local" (processes of this machine) or "inline" (in the kernel, for a debugger)."""

    devices: Sequence[int] | str | None = None
    """Indices of the accelerators to use, one rank each, or "cpu"; None: all that are visible."""

    backend: str | None = None
    """torch.distributed backend of the ranks; "gloo" lets several ranks share an accelerator."""

    use_port: int | None = None
    """MASTER_PORT of the ranks; None takes a free one.

    Ranks of a session meet at a free one after a call that failed: who is left of the group before
    may still use this port.
    """

    env: Mapping[str, str] | None = None
    """Environment variables of the ranks, beside those of the notebook."""

    grace: float = 10.0
    """Seconds that ranks get to leave: after Stop until they are interrupted, and after an
    interrupt until they are terminated."""

    debug: bool = False
    """Check the shapes of every collective across ranks, and have torch explain mismatches."""

    gradient_accumulation_steps: int | None = None
    """Batches a step, for every ``Accelerator`` that does not say its own."""

    seed: int | None = None
    """Of Python's, numpy's and torch's random numbers in every rank, as ``set_seed`` would; None:
    they go on from where the notebook's stand."""

    fsdp: Mapping[str, Any] | None = None
    """Fields of ``FullyShardedDataParallelPlugin``, for every ``Accelerator`` that is not given
    one; {} takes its defaults."""

    deepspeed: Mapping[str, Any] | None = None
    """Fields of ``DeepSpeedPlugin``, for every ``Accelerator`` that is not given one; {} takes its
    defaults."""

    parallelism: Mapping[str, Any] | None = None
    """Sizes of ``ParallelismConfig``, for every ``Accelerator`` that is not given one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_processes", _as_count("num_processes", self.num_processes))
        for name, optional in (("mixed_precision", True), ("engine", False), ("backend", True)):
            choices = (*choices_of(name), None) if optional else choices_of(name)
            _check_choice(name, getattr(self, name), choices)
        _check_port(self.use_port)
        _check_env(self.env)
        check_seconds("grace", self.grace)
        steps = _as_count("gradient_accumulation_steps", self.gradient_accumulation_steps)
        object.__setattr__(self, "gradient_accumulation_steps", steps)
        object.__setattr__(self, "seed", _as_seed(self.seed))
        for name, plugin in PLUGINS.items():
            object.__setattr__(self, name, plugin.check(name, getattr(self, name)))
        if not isinstance(self.debug, bool):
            raise ConfigError(f"debug={shown(self.debug)}: expected True or False")
        object.__setattr__(self, "grace", float(self.grace))
        object.__setattr__(self, "env", None if self.env is None else dict(self.env))
        object.__setattr__(self, "devices", _as_devices(self.devices))
        self._check_together()

    def _check_together(self) -> None:
        wanted, most = self.num_processes, _engines()[self.engine].max_ranks
        if wanted is not None and most is not None and wanted > most:
            raise ConfigError(
                f"engine={self.engine!r} has {most} rank{'s' * (most > 1)}, so num_processes="
                f"{wanted} cannot be had: leave it out, or take engine='local'"
            )
        asked = [name for name in PLUGINS if getattr(self, name) is not None]
        if len(asked) > 1 and not all(PLUGINS[name].composes for name in asked):
            raise ConfigError(f"{' and '.join(asked)} were given, which do not compose: pass one")
        if self.devices == "cpu" and not _BACKENDS.get(self.backend or "gloo"):
            raise ConfigError(
                f"backend={self.backend!r} needs GPUs: with devices='cpu' take 'gloo'"
            )
        if isinstance(self.devices, tuple) and wanted is not None and self.backend != "gloo":
            _check_enough(wanted, len(self.devices), f"devices={list(self.devices)}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LaunchConfig:
        """Read a YAML file, ours or one that ``accelerate config`` wrote.

        Raises:
            ConfigError: the file is not there, is no mapping, or holds what we cannot use.
        """
        return cls(**_settings_in_file(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings that differ from the defaults as YAML."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    def to_yaml(self) -> str:
        """The settings that differ from the defaults as YAML."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def to_dict(self) -> dict[str, Any]:
        """The settings that differ from the defaults, as plain values."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        default = {field.name: field.default for field in fields(self)}
        changed = {name: value for name, value in given.items() if value != default[name]}
        # YAML has lists, and no tuples.
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in changed.items()
        }


def choices_of(name: str) -> tuple[str, ...]:
    """The texts that this setting may be; none where it is no choice among some."""
    if name == "engine":
        return tuple(_engines())
    return {"mixed_precision": _PRECISIONS, "backend": tuple(_BACKENDS)}.get(name, ())


def descriptions() -> dict[str, str]:
    """What each setting does: the text under its field in ``LaunchConfig``."""
    (tree,) = ast.parse(inspect.getsource(LaunchConfig)).body
    nodes = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(nodes)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _engines() -> Mapping[str, type[Engine]]:
    """The engines by name: the one table of them is where they are (launch/engines)."""
    from notebook_accel.launch.engines import ENGINES

    return ENGINES


def default_config_path() -> Path:
    """The file of settings that every launch uses, where one was saved.

    Raises:
        ConfigError: this user has no home folder.
    """
    try:
        return Path(platformdirs.user_config_dir("notebook-accel")) / "config.yaml"
    except RuntimeError as error:
        raise ConfigError(f"there is no default config file: {error}") from None


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | bool:
    """Save a config file, unless there is one already.

    Args:
        mixed_precision: "no", "bf16", "fp16" or "fp8".
        save_location: the file; None is the default config file, which every launch uses.

    Returns:
        its path; False where there was one, which stays as it is.

    Raises:
        ConfigError: the precision makes no sense.
    """
    path = default_config_path() if save_location is None else Path(save_location)
    config = LaunchConfig(mixed_precision=mixed_precision)
    if path.exists():
        return False
    config.save(path)
    return path


def resolve(
    arguments: Mapping[str, Any],
    config: LaunchConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[LaunchConfig, list[str]]:
    """The settings of a launch, and lines for the person about where they came from.

    Args:
        arguments: what the caller gave, by the names of the fields; None leaves a field open.
        config: where the fields that the arguments leave open come from, before the environment
            and the default config file.

    Raises:
        ConfigError: a setting that makes no sense, or a name that is none.
    """
    notices: list[str] = []
    given = given_settings(arguments, config)
    saved: dict[str, Any] = {}
    path: Path | None = None
    with contextlib.suppress(ConfigError):
        path = default_config_path()
    if path is not None and path.is_file():
        notices.append(f"settings of {path} are used where the call gives none")
        saved = _settings_in_file(path)
    found = {**saved, **_from_environment(os.environ, given=given), **given}
    return LaunchConfig(**found), notices


def given_settings(
    arguments: Mapping[str, Any],
    config: LaunchConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """The settings that the caller itself gives; the arguments are those of :func:`resolve`.

    Raises:
        ConfigError: a name that is none, or a file that cannot be used.
    """
    given = _given_by(config)
    given.update({name: value for name, value in arguments.items() if value is not None})
    _check_names(given)
    return given


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


def _given_by(config: Any) -> dict[str, Any]:
    """The settings that the argument ``config`` of a launch gives."""
    if config is None:
        return {}
    if isinstance(config, LaunchConfig):
        return config.to_dict()
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, (str, os.PathLike)):
        return _settings_in_file(config)
    raise ConfigError(
        f"config={shown(config)}: expected a LaunchConfig, a mapping of its fields or a YAML "
        "file's path"
    )


# ---- environment ---------------------------------------------------------------------------


def _from_environment(
    environment: Mapping[str, str], *, given: Mapping[str, Any]
) -> dict[str, Any]:
    """What the environment says of the settings that are not ``given`` already."""
    found: dict[str, Any] = {}
    skipped = {*_NO_VARIABLE, *given}
    for name in (field.name for field in fields(LaunchConfig) if field.name not in skipped):
        variables = (f"NOTEBOOK_ACCEL_{name.upper()}", _ACCELERATE_VARIABLES.get(name, ""))
        variable = next((each for each in variables if environment.get(each, "").strip()), None)
        if variable is not None:
            found.update(_from_variable(name, variable, environment[variable].strip()))
    return found


def _from_variable(name: str, variable: str, text: str) -> dict[str, Any]:
    if variable == "ACCELERATE_USE_CPU":
        return {"devices": "cpu"} if parse_flag(variable, text) else {}
    try:
        value = value_of_text(name, text)
        LaunchConfig(**{name: value})
    except ConfigError as error:
        raise ConfigError(f"{variable}={shown(text)} in the environment: {error}") from None
    return {name: value}


def value_of_text(name: str, text: str) -> Any:
    """The value of a field that ``text`` means; the text itself where it is none of its type."""
    return value_of(text, get_type_hints(LaunchConfig)[name])


# ---- YAML ----------------------------------------------------------------------------------


def _settings_in_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings that a YAML file gives, checked."""
    try:
        data = _read(path)
        if "compute_environment" in data or "distributed_type" in data:
            data = _from_accelerate(data)
        _check_names(data)
        LaunchConfig(**data)
    except ConfigError as error:
        raise ConfigError(f"config file {os.fspath(path)!r}: {error}") from None
    return data


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    if Path(path).exists() and not Path(path).is_file():
        # Reading a FIFO or a terminal would wait for its writer for ever.
        raise ConfigError("it is no regular file")
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"it cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError("it cannot be read: it is nested too deeply") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"it holds a {type(data).__name__}; expected settings, one `name: value` a line"
        )
    # YAML's `no`, without quotes, is False.
    return {**data, "mixed_precision": "no"} if data.get("mixed_precision") is False else data


def _check_names(data: Mapping[Any, Any]) -> None:
    known = [field.name for field in fields(LaunchConfig)]
    unknown = [name for name in data if name not in known]
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ConfigError(
            f"no setting is called {', '.join(map(shown, unknown[:5]))}{more}; "
            f"there are {', '.join(known)}"
        )


def _from_accelerate(data: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``accelerate config``'s YAML a launch here can use, by our names."""
    absent = [
        f"{name}: {data[name]}"
        for name, values in _ACCELERATE_ABSENT.items()
        if data.get(name) in values
    ]
    if data.get("num_machines") not in (None, 1):
        absent.append(f"num_machines: {shown(data['num_machines'])}")
    if absent:
        raise ConfigError(
            f"{', '.join(absent)}: not supported; expected one machine, and the "
            "distributed_type NO, MULTI_CPU, MULTI_GPU, FSDP or DEEPSPEED"
        )
    found = {
        ours: data[theirs]
        for theirs, ours in _ACCELERATE_NAMES.items()
        if data.get(theirs) not in (None, "all")
    }
    kind = _ACCELERATE_TYPES.get(str(data.get("distributed_type")))
    # As for Accelerate, the section of another type than the file's counts for nothing.
    unused = {name for name in _ACCELERATE_TYPES.values() if name != kind}
    for name, plugin in PLUGINS.items():
        if data.get(plugin.section) and name not in unused:
            found[name] = plugin.from_accelerate(data[plugin.section])
    if kind is not None:
        found.setdefault(kind, {})
    return {**found, "devices": "cpu"} if data.get("use_cpu") else found


# ---- checks of one value -------------------------------------------------------------------


def _as_count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    number = _as_index(value)
    if number is None or number < 1:
        raise ConfigError(f"{name}={shown(value)}: expected a whole number, 1 or more")
    return number


def _as_index(value: Any) -> int | None:
    """The whole number that ``value`` is (numpy's included), else None."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _as_seed(value: Any) -> int | None:
    number = None if value is None else _as_index(value)
    if value is not None and (number is None or not 0 <= number < 2**63):
        raise ConfigError(f"seed={shown(value)}: expected a whole number, 0 or more, below 2**63")
    return number


def check_seconds(name: str, value: Any, *, above_zero: bool = False) -> None:
    """Refuse what is no number of seconds: text, flags, NaN, less than nothing.

    Raises:
        ConfigError: the message calls the value ``name``.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or value < 0 or (above_zero and not value):
        expected = "a number of seconds above 0" if above_zero else "seconds, 0 or more"
        raise ConfigError(f"{name}={shown(value)}: expected {expected}")


def _check_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    if not (value is None or isinstance(value, str)) or value not in choices:
        named = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise ConfigError(f"{name}={shown(value)}: expected one of {named}")


def _check_port(value: Any) -> None:
    number = _as_index(value)
    if value is not None and (number is None or not 0 < number < 65_536):
        raise ConfigError(f"use_port={shown(value)}: expected None (a free port) or 1 to 65535")


def _check_env(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(text, str) for name, text in value.items()
    ):
        raise ConfigError(f"env={shown(value)}: expected a mapping of names to texts")
    if any(not name or "=" in name for name in value) or "\0" in "".join((*value, *value.values())):
        raise ConfigError(f"env={shown(value)}: expected names without '=', and no NUL character")


def _as_devices(value: Any) -> tuple[int, ...] | str | None:
    if value is None or (isinstance(value, str) and value == "cpu"):
        return value
    devices = _as_indices(value)
    if not devices or min(devices) < 0 or len(set(devices)) < len(devices):
        raise ConfigError(
            f"devices={shown(value)}: expected 'cpu', or different indices such as [0, 2]"
        )
    return devices


def _as_indices(value: Any) -> tuple[int, ...]:
    """The whole numbers in ``value``; none where anything else is in it."""
    try:
        parts = [int(part) for part in value.split(",")] if isinstance(value, str) else list(value)
    except (TypeError, ValueError):
        return ()
    indices = [_as_index(part) for part in parts]
    return tuple(index for index in indices if index is not None) if None not in indices else ()
