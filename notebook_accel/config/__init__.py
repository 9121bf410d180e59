"""The settings of a launch: :func:`resolve` takes each from the first place that sets it.

    argument > config= > NOTEBOOK_ACCEL_* > ACCELERATE_* > default config file > default

A ``LaunchConfig`` sets only what differs from the defaults, since it does not know what its caller
wrote; the others set all that they mention. Options of a plugin, and variables of ``env`` that
begin with one of ``_PREFIXES``, are compared one by one: the file's counts if its variable is not
set.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from notebook_accel.config.checks import parse_flag, shown, value_of
from notebook_accel.config.engines import ENGINES
from notebook_accel.config.file import expanded
from notebook_accel.config.launch_config import LaunchConfig as LaunchConfig
from notebook_accel.config.launch_config import check_names, settings_in_file
from notebook_accel.config.launch_config import shares_devices as shares_devices
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.config.setting import settings_of as settings_of
from notebook_accel.errors import ConfigError

# Settings whose values are no text.
_NO_VARIABLE = ("env", *PLUGINS)
_PREFIXES = ("NOTEBOOK_ACCEL_", "ACCELERATE_", "PARALLELISM_CONFIG_")


def default_config_path() -> Path:
    """Every launch reads it if it exists; ConfigError if this user has no home folder."""
    try:
        return Path(platformdirs.user_config_dir("notebook-accel")) / "config.yaml"
    except RuntimeError as error:
        raise ConfigError(f"there is no default config file: {error}") from None


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | bool:
    """Write a config file with a mixed precision and defaults, unless the file exists.

    Args:
        mixed_precision: "no", "bf16", "fp16" or "fp8".
        save_location: the file; None means the default config file, which every launch reads.

    Returns:
        The path of the new file; False if the file existed already, which leaves it unchanged.

    Raises:
        ConfigError: ``mixed_precision`` is unknown.
        OSError: the file cannot be written.

    Example:
        >>> import os, tempfile
        >>> from notebook_accel.utils import write_basic_config
        >>> path = os.path.join(tempfile.mkdtemp(), "config.yaml")
        >>> write_basic_config("bf16", path).name
        'config.yaml'
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
    """Return the settings of a launch, and lines for the user ("settings of ... are used").

    Raises:
        ConfigError: a setting is invalid, or a name is no setting.
    """
    given, notices = given_settings(arguments, config)
    saved: dict[str, Any] = {}
    path: Path | None = None
    with contextlib.suppress(ConfigError):
        path = default_config_path()
    # Not Path.is_file, which raises where the folder may not be entered, as in a container whose
    # HOME is another user's: what cannot be looked at counts as not saved.
    if path is not None and os.path.isfile(path):
        saved, not_used = settings_in_file(path)
        notices += [f"settings of {path} are used where the call gives none", *not_used]
        saved = _left_open(saved, given)
    found: dict[str, Any] = {}
    for source in (given, _from_environment(given), saved):
        name, wanted = found.get("engine"), source.get("num_processes")
        kind = ENGINES.get(name) if isinstance(name, str) else None
        # An engine of few ranks beats a larger number of a later source.
        is_too_many = wanted and kind and kind.max_ranks and wanted > kind.max_ranks
        found = {**source, **({"num_processes": None} if is_too_many else {}), **found}
    chosen = LaunchConfig(**found)
    environment = {**os.environ, **(chosen.env or {})}
    # Seen with torch 2.13: DDP casts its group to gloo's class, and DETAIL has wrapped that.
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        notices.append(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL is set: with it, torch ends a rank by SIGSEGV as soon "
            "as a model is prepared for DDP on CPUs. Take it out of the environment, or set it to "
            "INFO"
        )
    return chosen, notices


def given_settings(
    arguments: Mapping[str, Any],
    config: LaunchConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """As :func:`resolve`, without the environment and the default config file, by names."""
    given: dict[str, Any] = {}
    notices: list[str] = []
    if isinstance(config, LaunchConfig):
        given = config.to_dict()
    elif isinstance(config, Mapping):
        given = dict(config)
    elif isinstance(config, (str, os.PathLike)):
        given, notices = settings_in_file(config)
    elif config is not None:
        raise ConfigError(
            f"config={shown(config)}: expected a LaunchConfig, a mapping of its fields or a YAML "
            "file's path"
        )
    given.update({name: value for name, value in arguments.items() if value is not None})
    check_names(given)
    return given, notices


# ---- environment ---------------------------------------------------------------------------


def _from_environment(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, row in settings_of(LaunchConfig).items():
        variable = row.variable_set(os.environ)
        if variable is None or name in (*_NO_VARIABLE, *given):
            continue
        text = os.environ[variable].strip()
        if variable != "ACCELERATE_USE_CPU":
            found[name] = row.from_text(text)
        elif parse_flag(variable, text):
            found[name] = "cpu"
        try:
            LaunchConfig(**{name: found.get(name, row.default)})
        except ConfigError as error:
            raise ConfigError(f"{variable}={shown(text)} in the environment: {error}") from None
    return found


def _left_open(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default config file's settings, without the parts that the environment sets.

    A plugin becomes None if the environment turns it off, or the call or environment excludes it.
    Settings with a variable of their own are kept: the caller lets the variables win.
    """
    found = dict(saved)
    refuses_cpu = value_of(os.environ.get("ACCELERATE_USE_CPU", ""), bool) is False
    if refuses_cpu and found.get("devices") == "cpu":
        del found["devices"]
    for name in [name for name in PLUGINS if saved.get(name) is not None and name not in given]:
        plugin = PLUGINS[name]
        found[name] = {
            option: value
            for option, value in saved[name].items()
            if not os.environ.get(plugin.options[option].variable, "").strip()
        }
        is_beaten = any(
            given.get(other) is not None or PLUGINS[other].asked_by_environment
            for other in PLUGINS.keys() - {name}
            if not (plugin.composes and PLUGINS[other].composes)
        )
        if is_beaten or plugin.asked_by_environment is False:
            found[name] = None
    if saved.get("env"):
        found["env"] = {
            variable: text
            for variable, text in saved["env"].items()
            if not (variable.startswith(_PREFIXES) and os.environ.get(variable, "").strip())
        }
    return found
