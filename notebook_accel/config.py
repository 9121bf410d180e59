"""The settings of a launch: one dataclass, where its values come from, and its YAML.

    argument > config= > NOTEBOOK_ACCEL_* > ACCELERATE_* > default config file > default

:func:`resolve` takes each setting from the first of these that gives it. An argument, a mapping
and a YAML file give what is written in them, also where that is the default; a ``LaunchConfig``
gives what differs from the defaults, since it cannot tell what was written.

Mappings are no text: ``fsdp``, ``deepspeed`` and ``parallelism`` have a variable of Accelerate's
launcher for each option (plugin_options.py), which ranks read by themselves. What the default
config file says of such an option, or of such a variable in ``env``, holds only where the
environment does not say it.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import math
import os
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import platformdirs
import yaml

from notebook_accel import accelerate_yaml
from notebook_accel.config_file import expanded, read_settings, replace_text
from notebook_accel.errors import ConfigError
from notebook_accel.plugin_options import PLUGINS
from notebook_accel.setting_checks import (
    as_choice,
    as_count,
    as_devices,
    as_env,
    as_port,
    as_seed,
    check_enough,
    check_seconds,
)
from notebook_accel.text_values import parse_flag, shown, value_of

if TYPE_CHECKING:
    from notebook_accel.launch.engines.base import Engine

__all__ = [
    "LaunchConfig",
    "choices_of",
    "default_config_path",
    "descriptions",
    "given_settings",
    "resolve",
    "shares_devices",
    "value_of_text",
    "write_basic_config",
]

_PRECISIONS = ("no", "bf16", "fp16", "fp8")


class _Backend(NamedTuple):
    """What a backend of torch.distributed can do."""

    works_on_cpu: bool
    shares_devices: bool
    """Whether several ranks may use one accelerator."""


_BACKENDS = {
    "nccl": _Backend(works_on_cpu=False, shares_devices=False),
    "gloo": _Backend(works_on_cpu=True, shares_devices=True),
}

# Settings for which Accelerate's launcher has a variable.
_ACCELERATE_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "debug": "ACCELERATE_DEBUG_MODE",
    "devices": "ACCELERATE_USE_CPU",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}
_NO_VARIABLE = ("env", *PLUGINS)
_PREFIXES = ("NOTEBOOK_ACCEL_", "ACCELERATE_", "PARALLELISM_CONFIG_")
# Engines that are planned: whoever asks for one is told so.
_ENGINES_TO_COME = ("xla", "elastic", "ray")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How a run is launched; checked at construction.

    Raises:
        ConfigError: a setting that makes no sense, alone or with another.
    """

    num_processes: int | None = None
    """Number of ranks, the processes that train; None: one for each visible accelerator, 1 on a
    machine with none."""

    mixed_precision: str | None = None
    """"no", "bf16", "fp16" or "fp8", for every ``Accelerator`` that does not say its own."""

    engine: str = "auto"
    """"auto", "local" (processes of this machine) or "inline" (in the kernel, for a debugger)."""

    devices: Sequence[int] | str | None = None
    """Indices of the accelerators to use, one rank each, or "cpu"; None: all that are visible."""

    backend: str | None = None
    """torch.distributed backend of the ranks; "gloo" lets several ranks share an accelerator."""

    use_port: int | None = None
    """The port at which the ranks meet (MASTER_PORT); None takes a free one.

    Ranks of a session meet at a free one after a call that failed: who is left of the group before
    may still use this port.
    """

    env: Mapping[str, str] | None = field(default=None, repr=False)
    """Environment variables of the ranks, beside those of the notebook. They may be secrets, and
    what is shown of the settings leaves them out."""

    grace: float = 10.0
    """Seconds that ranks get to leave: after Stop until they are interrupted, and after an
    interrupt until they are terminated."""

    debug: bool = False
    """Check the shapes of every collective across ranks, and have torch explain mismatches."""

    gradient_accumulation_steps: int | None = None
    """Batches whose gradients are added up for each step, for every ``Accelerator`` that does not
    say its own."""

    seed: int | None = None
    """Seed of the random numbers of Python, numpy and torch in every rank; None: they go on from
    where the notebook's stand. With engine="inline" they are the notebook's own."""

    fsdp: Mapping[str, Any] | None = None
    """Fields of ``FullyShardedDataParallelPlugin``, for every ``Accelerator`` that is not given
    one; {} takes its defaults."""

    deepspeed: Mapping[str, Any] | None = None
    """Fields of ``DeepSpeedPlugin``, for every ``Accelerator`` that is not given one; {} takes its
    defaults."""

    parallelism: Mapping[str, Any] | None = None
    """Sizes of ``ParallelismConfig``, for every ``Accelerator`` that is not given one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_processes", as_count("num_processes", self.num_processes))
        is_to_come = isinstance(self.engine, str) and self.engine in _ENGINES_TO_COME
        if is_to_come and self.engine not in _engines():
            raise ConfigError(
                f"engine={self.engine!r} is not there yet (TPUs, several machines, restarts and "
                f"Ray are not built): expected one of {', '.join(map(repr, _engines()))}"
            )
        for name, optional in (("mixed_precision", True), ("engine", False), ("backend", True)):
            choices = (*choices_of(name), None) if optional else choices_of(name)
            object.__setattr__(self, name, as_choice(name, getattr(self, name), choices))
        object.__setattr__(self, "use_port", as_port(self.use_port))
        object.__setattr__(self, "env", as_env(self.env))
        check_seconds("grace", self.grace)
        steps = as_count("gradient_accumulation_steps", self.gradient_accumulation_steps)
        object.__setattr__(self, "gradient_accumulation_steps", steps)
        object.__setattr__(self, "seed", as_seed(self.seed))
        for name, plugin in PLUGINS.items():
            object.__setattr__(self, name, plugin.check(name, getattr(self, name)))
        if not isinstance(self.debug, bool):
            raise ConfigError(f"debug={shown(self.debug)}: expected True or False")
        object.__setattr__(self, "grace", float(self.grace))
        object.__setattr__(self, "devices", as_devices(self.devices))
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
        backend = _BACKENDS.get(self.backend or "")
        if self.devices == "cpu" and backend is not None and not backend.works_on_cpu:
            raise ConfigError(
                f"backend={self.backend!r} needs GPUs: with devices='cpu' take 'gloo'"
            )
        if isinstance(self.devices, tuple) and wanted is not None and not shares_devices(self):
            check_enough(wanted, len(self.devices), f"devices={list(self.devices)}")
        # How many more there may be, a plugin that the function makes can say.
        num_divided = math.prod((self.parallelism or {}).values())
        if wanted is not None and wanted % num_divided:
            raise ConfigError(
                f"parallelism={self.parallelism} takes {num_divided} ranks, and num_processes="
                f"{wanted}: make num_processes that, or a multiple of it"
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LaunchConfig:
        """Read a YAML file, ours or one that ``accelerate config`` wrote.

        Of Accelerate's, a warning names what a launch here does not use.

        Raises:
            ConfigError: the file is not there, is no mapping, or holds what we cannot use.
        """
        settings, notices = _settings_in_file(path)
        for notice in notices:
            warnings.warn(notice, stacklevel=2)
        return cls(**settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings that differ from the defaults as YAML.

        The file's folder is made, and a file that is there is replaced as a whole: it keeps its
        mode, and stays as it was where the new one cannot be written.

        Raises:
            ConfigError: the path begins with "~", and there is no such home folder.
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


class _SettingsDoc:
    """The docstring of ``LaunchConfig``: its own text, and the one under each field.

    It is made when it is read, since that parses this file, which takes longer than its import.
    """

    def __init__(self, head: str) -> None:
        self._head = inspect.cleandoc(head)

    def __get__(self, _config: object, _owner: type) -> str:
        about = descriptions()
        rows = [
            f"{one.name}: {one.type} = {one.default!r}\n{textwrap.indent(about[one.name], ' ' * 4)}"
            for one in fields(LaunchConfig)
        ]
        return f"{self._head}\n\nSettings:\n{textwrap.indent(chr(10).join(rows), ' ' * 4)}\n"


LaunchConfig.__doc__ = _SettingsDoc(LaunchConfig.__doc__ or "")  # type: ignore[assignment]


def choices_of(name: str) -> tuple[str, ...]:
    """The texts that this setting may be; none where it is no choice among some."""
    if name == "engine":
        return tuple(_engines())
    return {"mixed_precision": _PRECISIONS, "backend": tuple(_BACKENDS)}.get(name, ())


def shares_devices(config: LaunchConfig) -> bool:
    """Whether several ranks of a launch may use one accelerator, as its backend allows."""
    backend = _BACKENDS.get(config.backend or "")
    return backend is not None and backend.shares_devices


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
        OSError: the file cannot be written.
    """
    path = default_config_path() if save_location is None else expanded(save_location)
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
    given, notices = _given(arguments, config)
    saved: dict[str, Any] = {}
    path: Path | None = None
    with contextlib.suppress(ConfigError):
        path = default_config_path()
    # Not Path.is_file, which raises where the folder may not be entered, as in a container whose
    # HOME is another user's: what cannot be looked at counts as not saved.
    if path is not None and os.path.isfile(path):
        saved, not_used = _settings_in_file(path)
        notices += [f"settings of {path} are used where the call gives none", *not_used]
        saved = _left_open(saved, os.environ, given=given)
    found = _first_of(given, _from_environment(os.environ, given=given), saved)
    return LaunchConfig(**found), notices


def _first_of(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Each setting from the first source that gives it.

    Who chooses an engine of few ranks has not asked for the many that a later source says.
    """
    found: dict[str, Any] = {}
    for source in sources:
        name, wanted = found.get("engine"), source.get("num_processes")
        engine = _engines().get(name) if isinstance(name, str) else None
        is_too_many = wanted and engine and engine.max_ranks and wanted > engine.max_ranks
        left = {**source, "num_processes": None} if is_too_many else source
        found = {**left, **found}
    return found


def given_settings(
    arguments: Mapping[str, Any],
    config: LaunchConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """The settings that the caller itself gives; the arguments are those of :func:`resolve`.

    Raises:
        ConfigError: a name that is none, or a file that cannot be used.
    """
    return _given(arguments, config)[0]


def _given(
    arguments: Mapping[str, Any],
    config: LaunchConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
) -> tuple[dict[str, Any], list[str]]:
    """As :func:`given_settings`, and lines about what a file has beside them."""
    given, notices = _given_by(config)
    given.update({name: value for name, value in arguments.items() if value is not None})
    _check_names(given)
    return given, notices


def _given_by(config: Any) -> tuple[dict[str, Any], list[str]]:
    """The settings that the argument ``config`` of a launch gives, and lines about them."""
    if config is None:
        return {}, []
    if isinstance(config, LaunchConfig):
        return config.to_dict(), []
    if isinstance(config, Mapping):
        return dict(config), []
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
    for name in (one.name for one in fields(LaunchConfig) if one.name not in skipped):
        variables = (f"NOTEBOOK_ACCEL_{name.upper()}", _ACCELERATE_VARIABLES.get(name, ""))
        variable = next((each for each in variables if environment.get(each, "").strip()), None)
        if variable is not None:
            found.update(_from_variable(name, variable, environment[variable].strip()))
    return found


def _left_open(
    saved: Mapping[str, Any], environment: Mapping[str, str], *, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The ``saved`` settings, without what the environment says itself or rules out.

    A plugin that the environment turns off, or that does not compose with one that the environment
    or the call asks for, is left out as a whole.
    """
    found = dict(saved)
    if found.get("devices") == "cpu" and _refuses_cpu(environment):
        del found["devices"]
    for name, plugin in PLUGINS.items():
        if saved.get(name) is not None and name not in given:
            left = plugin.left_open(saved[name], environment)
            is_off = plugin.asked_by(environment) is False or _is_beaten(name, environment, given)
            found[name] = None if is_off else left
    if saved.get("env"):
        found["env"] = {
            variable: text
            for variable, text in saved["env"].items()
            if not (variable.startswith(_PREFIXES) and environment.get(variable, "").strip())
        }
    return found


def _refuses_cpu(environment: Mapping[str, str]) -> bool:
    """Whether Accelerate's variable says that ranks are not to be on the CPU."""
    return value_of(environment.get("ACCELERATE_USE_CPU", ""), bool) is False


def _is_beaten(name: str, environment: Mapping[str, str], given: Mapping[str, Any]) -> bool:
    """Whether the call or the environment asks for a plugin that does not compose with this one."""
    return any(
        given.get(other) is not None or plugin.asked_by(environment)
        for other, plugin in PLUGINS.items()
        if other != name and not (plugin.composes and PLUGINS[name].composes)
    )


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


def _settings_in_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings that a YAML file gives, checked; and lines about what else it has."""
    name = f"config file {os.fspath(path)!r}"
    not_used: list[str] = []
    try:
        data = read_settings(expanded(path))
        if accelerate_yaml.is_accelerates(data):
            data, not_used = accelerate_yaml.settings_of(data)
        _check_names(data)
        LaunchConfig(**data)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return data, [f"{name}: {line}" for line in not_used]


def _check_names(data: Mapping[Any, Any]) -> None:
    known = [field.name for field in fields(LaunchConfig)]
    unknown = [name for name in data if name not in known]
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ConfigError(
            f"no setting is called {', '.join(map(shown, unknown[:5]))}{more}; "
            f"there are {', '.join(known)}"
        )
