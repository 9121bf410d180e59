"""Converts the YAML that ``accelerate config`` writes into settings of a launch.

    the file's names --settings_from--> settings by our names, and lines about unused entries

For some entries there is no setting here: ``dynamo_config``, ``fp8_config``,
``enable_cpu_affinity``, and the communication strategy of context parallelism. Accelerate's
launcher passes them to its ranks as environment variables; here they become entries of the setting
``env``, whose variables the ranks get, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notebook_accel.config.checks import as_count, shown
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.config.setting import Setting
from notebook_accel.errors import ConfigError

# Types in the file that this package does not have.
_ABSENT = ("MEGATRON_LM", "XLA", "TPU")
ON_TPU = "; on a TPU, notebook_launcher(function, engine='xla') in a notebook trains"
# What its distributed_type means where the section that says more is left out.
_TYPES = {name.upper(): name for name, plugin in PLUGINS.items() if not plugin.needs_options}
# Names with which nothing is done here: a training goes on without them, so they are no error.
WITHOUT_EFFECT = ("mpirun_config", "ipex_config", "downcast_bf16")
# Values that mean what leaving the name out means here.
LEFT_OPEN = (("gpu_ids", "all"), ("main_process_port", "0"))
_NOTHING: tuple[Any, ...] = (None, False, "", "no", "NO", {}, [])
# What of `dynamo_config` and `fp8_config` an Accelerator in a rank reads, as ACCELERATE_*.
READ_BY_RANKS = (
    *("dynamo_backend", "dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic"),
    *("dynamo_use_regional_compilation", "fp8_pad_inner_dim"),
)


def settings_from(
    data: Mapping[str, Any], settings: Mapping[str, Setting]
) -> tuple[dict[str, Any], list[str]]:
    """Return settings, and lines about entries not used; ConfigError for what we lack."""
    _check_possible(data)
    found = {
        name: data[row.yaml]
        for name, row in settings.items()
        if row.yaml
        and data.get(row.yaml) is not None
        and (row.yaml, str(data[row.yaml])) not in LEFT_OPEN
    }
    _count_for_each_machine(found)
    asked = data.get("distributed_type")
    kind = _TYPES.get(asked) if isinstance(asked, str) else None
    # As for Accelerate, the section of another type than the file's counts for nothing.
    unused = {name for name in _TYPES.values() if name != kind}
    variables, ignored = _variables(data)
    for name, plugin in PLUGINS.items():
        if data.get(plugin.section) and name not in unused:
            found[name] = plugin.from_accelerate(data[plugin.section])
            variables |= plugin.variables_of_accelerate(data[plugin.section])
    if kind is not None:
        found.setdefault(kind, {})
    if data.get("use_cpu"):
        found["devices"] = "cpu"
    if data.get("enable_cpu_affinity") not in _NOTHING:
        variables["ACCELERATE_CPU_AFFINITY"] = "true"
    if variables:
        found["env"] = variables
    ignored += [name for name in WITHOUT_EFFECT if data.get(name) not in _NOTHING]
    return found, [f"{', '.join(ignored)}: not used here"] if ignored else []


def _count_for_each_machine(found: dict[str, Any]) -> None:
    """Replace the total of all machines; with one machine, drop the main machine's address."""
    num_nodes, total = as_count("num_machines", found.get("num_nodes", 1)), "num_processes"
    if num_nodes == 1:
        found.pop("master_addr", None)
    elif total in found:
        num_processes = as_count(total, found[total])
        if num_processes % num_nodes:
            raise ConfigError(
                f"num_processes: {num_processes} on num_machines: {num_nodes}: expected the same "
                "number on each machine"
            )
        found[total] = num_processes // num_nodes


def _check_possible(data: Mapping[str, Any]) -> None:
    asked = data.get("distributed_type")
    if asked in _ABSENT:
        raise ConfigError(
            f"distributed_type: {asked}: not supported; expected the distributed_type NO, "
            f"MULTI_CPU, MULTI_GPU, FSDP or DEEPSPEED{ON_TPU if asked in ('XLA', 'TPU') else ''}"
        )
    if data.get("machine_rank"):
        raise ConfigError(
            f"machine_rank: {shown(data['machine_rank'])}: the file is another machine's, and the "
            "notebook is on machine 0. There, run the command that the notebook shows"
        )


def _variables(data: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    compiling = _section(data, "dynamo_config")
    if compiling.get("dynamo_backend") in _NOTHING:
        compiling = {}
    in_8_bits = _section(data, "fp8_config") if data.get("mixed_precision") == "fp8" else {}
    found: dict[str, str] = {}
    ignored: list[str] = []
    for name, value in {**compiling, **in_8_bits}.items():
        if name in READ_BY_RANKS and isinstance(value, (str, bool)):
            found[f"ACCELERATE_{name.upper()}"] = str(value)
        # "AO", torchao, is what computes in 8 bits here.
        elif value not in _NOTHING and (name, value) != ("fp8_backend", "AO"):
            ignored.append(f"{name}={shown(value)}")
    return found, ignored


def _section(data: Mapping[str, Any], section: str) -> dict[str, Any]:
    """``backend`` and ``dynamo_backend`` in ``dynamo_config`` both become ``dynamo_backend``."""
    given = data.get(section) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{section}: {shown(given)}: expected names with values below it")
    prefix = section.removesuffix("config")
    return {prefix + str(name).removeprefix(prefix): value for name, value in given.items()}
