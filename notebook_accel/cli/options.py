"""Settings of a launch as options of a command line.

    settings of LaunchConfig and of the plugins --add_settings--> options
    typed options --typed_settings--> settings by our names, and lines about unused options

Each option has the setting's own name and its name in ``accelerate launch``, with ``_`` or ``-``
between words. The tables in this file are for options of ``accelerate launch`` that are no settings
of this package, such as flags that choose a kind of launch, and YAML entries that ranks read.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from notebook_accel.config import LaunchConfig, accelerate_yaml, resolve, settings_of
from notebook_accel.config.launch_config import settings_in_file
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.config.setting import Setting
from notebook_accel.errors import ConfigError

# Names of Accelerate's launcher, in its options and its YAML, for options of torchrun.
_MACHINES = {
    "num_machines": "nnodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "rdzv_backend": "rdzv_backend",
}
# Flags of `accelerate launch`, and what its YAML says in their place.
_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"use_cpu": True},
    "enable_cpu_affinity": {"enable_cpu_affinity": True},
    "tpu": {"distributed_type": "XLA"},
    "use_megatron_lm": {"distributed_type": "MEGATRON_LM"},
}
# What needs no option here: it follows from the devices, or from the other options.
_ACCEPTED_FLAGS = ("multi_gpu", "same_network", "quiet", "downcast_bf16")
# Of other libraries for 8 bits: they are taken, and a line says that they are not used.
_FP8_UNUSED = (
    *("fp8_backend", "fp8_margin", "fp8_interval", "fp8_format", "fp8_opt_level"),
    *("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_override_linear_precision"),
    *("fp8_enable_fsdp_float8_all_gather", "fp8_use_autocast_during_eval"),
)
# Beginnings of options of `accelerate launch` for what is not there.
_REFUSED = {
    "megatron_lm_": "Megatron-LM is not supported; --use_fsdp or a mesh (--tp_size) is",
    "parallelism_config_sp_": "sequences are divided by --cp_size",
    "aws_": "jobs on SageMaker are not supported",
    **dict.fromkeys(
        ("tpu_", "no_tpu_", "vm"), f"pods of TPUs are not supported{accelerate_yaml.ON_TPU}"
    ),
}
_SECTIONS = ("dynamo_config", "fp8_config")


def spellings(*names: str) -> list[str]:
    """Return each name with "--", with underscores and with dashes, once; no empty ones."""
    both = (f"--{text}" for name in names if name for text in (name, name.replace("_", "-")))
    return list(dict.fromkeys(both))


def add_settings(parser: ArgumentParser) -> None:
    """Add options to ``parser``: one per setting, and those that only ``accelerate launch`` has."""
    probe = ArgumentParser(parents=[parser], add_help=False)

    machines = parser.add_argument_group("machines, as in `accelerate launch`")
    for key, option in _MACHINES.items():
        _add(probe, machines, (key,), dest=option, default=SUPPRESS, help=f"The same as --{option}")
    group = parser.add_argument_group("settings of the ranks")
    _add(probe, group, ("config", "config_file"), help="YAML file, ours or of `accelerate config`")
    for name, row in settings_of(LaunchConfig).items():
        if name == "env":
            _add(probe, group, (name,), action="append", metavar="NAME=VALUE", help=_help(row))
        elif name not in PLUGINS:
            kind = {"action": "store_const", "const": "true"} if row.kind is bool else {}
            _add(probe, group, (name, row.yaml), help=_help(row), **kind)
    _add_plugins(parser, probe)
    as_in = parser.add_argument_group("as in `accelerate launch`")
    for flag in (*_FLAGS, *_ACCEPTED_FLAGS):
        _add(probe, as_in, (flag,), action="store_true", dest=f"flag {flag}")
    for key in (*accelerate_yaml.READ_BY_RANKS, *_FP8_UNUSED):
        kind = {"action": "store_true"} if "_use_" in key else {}
        _add(probe, as_in, (key,), dest=f"section {key}", **kind)
    as_in.add_argument("-q", action="store_true", help=SUPPRESS)
    _add(probe, as_in, ("num_cpu_threads_per_process",), help="Threads of a rank (OMP_NUM_THREADS)")
    for key in (*accelerate_yaml.WITHOUT_EFFECT, "main_training_function", "mpirun_hostfile"):
        _add(probe, as_in, (key,), dest=f"accepted {key}", help=SUPPRESS)


def _add_plugins(parser: ArgumentParser, probe: ArgumentParser) -> None:
    for name, plugin in PLUGINS.items():
        of_plugin = parser.add_argument_group(plugin.title, plugin.about)
        switch = plugin.switch.lower().removeprefix("accelerate_")
        _add(probe, of_plugin, (switch, f"use_{name}"), action="store_true", dest=f"use {name}")
        for key, row in plugin.options.items():
            names = (row.variable.lower().removeprefix("accelerate_"), row.yaml, key)
            _add(probe, of_plugin, names, dest=f"{name} {row.yaml or key}", help=_help(row))
        for key in (*plugin.read_by_ranks, *plugin.without_effect):
            _add(probe, of_plugin, (key,), dest=f"{name} {key}", help=SUPPRESS)


def _add(probe: ArgumentParser, group: Any, names: Iterable[str], **options: Any) -> None:
    """Add an option under its free spellings, if any; the first name is its ``dest``.

    ``probe`` has all options so far: argparse refuses a second use.
    """
    free = []
    for text in spellings(*names):
        with suppress(ArgumentError):
            probe.add_argument(text)
            free.append(text)
    if free:
        if "action" not in options:
            options.setdefault("metavar", "VALUE")
        options.setdefault("dest", next(iter(names)))
        group.add_argument(*free, **options)


def _help(row: Setting) -> str:
    return row.text.replace("``", "`").replace("%", "%%")


def typed_settings(typed: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return settings by name, and lines about options not used; ConfigError for wrong ones."""
    rows = settings_of(LaunchConfig)
    values = vars(typed)
    as_yaml: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    for flag, meaning in _FLAGS.items():
        if values[f"flag {flag}"]:
            as_yaml |= meaning
    for section in _SECTIONS:
        prefix = section.removesuffix("config")
        names = {name: text for name, text in _below("section", values) if name.startswith(prefix)}
        as_yaml[section] = names
    as_yaml["mixed_precision"] = "fp8" if as_yaml["fp8_config"] else None
    found, notices = accelerate_yaml.settings_from(as_yaml, rows)
    found.pop("mixed_precision", None)
    for name, row in rows.items():
        text = values.get(name)
        means_nothing = text is None or (row.yaml, text) in accelerate_yaml.LEFT_OPEN
        if name in ("env", *PLUGINS) or means_nothing:
            continue
        found[name] = row.from_text(text)
    for name, plugin in PLUGINS.items():
        options = dict(_below(name, values))
        if options or values[f"use {name}"]:
            found[name] = plugin.from_accelerate(options)
            found["env"] = {**found.get("env", {}), **plugin.variables_of_accelerate(options)}
    variables = {**found.pop("env", {}), **_variables(typed.env or ())}
    return {**found, **({"env": variables} if variables else {})}, notices


def refuse_option(word: str) -> NoReturn:
    """Raise a ConfigError for an option that there is not, with what to take instead if known."""
    option = word.partition("=")[0]
    name = option.lstrip("-").replace("-", "_")
    reasons = [why for start, why in _REFUSED.items() if name.startswith(start)]
    why = reasons[0] if reasons else "there is no such option; --help lists all"
    raise ConfigError(f"{option}: {why}")


def _below(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return those whose ``dest`` is ``prefix``, a space and a name: of a plugin, or "section"."""
    return [
        (name.partition(" ")[2], value)
        for name, value in values.items()
        if name.startswith(f"{prefix} ") and value
    ]


def _variables(typed: Iterable[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in typed]
    for name, sign, _ in pairs:
        if not name or not sign:
            raise ConfigError(f"--env {name}: expected NAME=VALUE")
    return {name: value for name, _, value in pairs}


def resolve_options(typed: Namespace) -> tuple[LaunchConfig, dict[str, Any], list[str]]:
    """Return the settings, the file's entries about machines by torchrun's names, and notices.

    Typed entries of a mapping (``env``, a plugin) are added to those of ``--config_file``, and win.
    ConfigError for a setting that is invalid, alone or together with another.
    """
    given, notices = typed_settings(typed)
    in_file: dict[str, Any] = {}
    machines = dict.fromkeys(_MACHINES)
    if typed.config is not None:
        in_file, more = settings_in_file(typed.config, machines)
        notices += more
    for name in ("env", *PLUGINS):
        if name in given and in_file.get(name):
            given[name] = {**in_file[name], **given[name]}
    config, others = resolve(given, in_file)
    named = {_MACHINES[name]: value for name, value in machines.items() if value is not None}
    return config, named, notices + others
