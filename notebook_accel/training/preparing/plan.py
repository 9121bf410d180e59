"""The settings of an ``Accelerator``: arguments, checked and completed from the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.training import precision
from notebook_accel.training.precision.float8 import AORecipeKwargs
from notebook_accel.training.processes import topology
from notebook_accel.training.settings.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    pick_handler,
)
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.stepping.accumulation import Accumulation, resolve_plugin
from notebook_accel.training.strategies import PLUGIN_ARGUMENTS, resolve_plugins
from notebook_accel.training.strategies.compiling import TorchDynamoPlugin, resolve_dynamo
from notebook_accel.training.strategies.strategy_request import Request

# Arguments of Hugging Face's Accelerator that are not built here, and what to use instead.
UNBUILT = {
    "megatron_lm_plugin": "Megatron-LM is not there; tensor and pipeline parallelism by torch is: "
    "parallelism_config=ParallelismConfig(tp_size=..., pp_size=...)",
    "torch_tp_plugin": "pass parallelism_config=ParallelismConfig(tp_size=...) instead",
}
_NOTHING = (None, "no", "NO")


def make_request(
    *,
    cpu: bool,
    mixed_precision: str | None,
    num_steps: int | None,
    plugin: GradientAccumulationPlugin | None,
    handlers: Iterable[KwargsHandler],
    plugins: Mapping[str, Any],
    dynamo: Any,
    dynamo_backend: Any,
    loaders: DataLoaderConfiguration,
    device_placement: bool,
    step_scheduler_with_optimizer: bool,
    rng_types: Iterable[Any] | None,
) -> Request:
    """Check the settings of an ``Accelerator`` and make the process group; return the settings.

    All ranks call it, since they make the process group together. Most settings are checked before,
    so that an invalid one raises at once and no rank is left waiting for the others.

    The arguments are those of ``Accelerator``, some under other names: ``num_steps``
    (``gradient_accumulation_steps``), ``plugin`` (``gradient_accumulation_plugin``), ``handlers``
    (``kwargs_handlers``), ``dynamo`` (``dynamo_plugin``) and ``loaders`` (``dataloader_config``).
    ``plugins`` has all arguments that choose a strategy, by name.
    """
    checked = _check_handlers(handlers)
    _check_type("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
    _check_type("dynamo_plugin", dynamo, TorchDynamoPlugin)
    if isinstance(rng_types, str):
        raise ConfigError(
            f'rng_types={rng_types!r}: expected a list of names, such as ["torch", "generator"]'
        )
    if plugin is not None and num_steps not in (None, 1):
        raise ConfigError(
            f"gradient_accumulation_steps={num_steps} and a gradient_accumulation_plugin were "
            "given: pass one of them"
        )
    chosen = resolve_plugins(plugins)
    compiling = resolve_dynamo(dynamo, dynamo_backend)
    num_ranks, num_local_ranks = topology.count_ranks()
    for one in chosen.values():
        one.check_ranks(chosen, num_ranks, num_local_ranks)
        # What a plugin's own configuration says holds for everything here.
        mixed_precision = one.resolve_precision(mixed_precision)
        num_steps = one.resolve_steps(num_steps)
    precision_name = precision.resolve_precision(mixed_precision)
    if any(one.divides_layers for one in chosen.values()):
        precision.refuse_divided_layers(precision_name)
    window = resolve_plugin(None if plugin else num_steps, plugin)
    found = topology.establish(cpu=cpu, options=pick_handler(checked, InitProcessGroupKwargs))
    if cpu and found.device.type != "cpu":
        notice_once(
            "cpu",
            f"cpu=True came too late: this rank computes on {found.device}. Make the rank's first "
            "Accelerator (or PartialState) with cpu=True, or launch with devices='cpu'",
        )
    return Request(
        topology=found,
        precision=precision.PRECISIONS[precision_name](found.device, checked),
        handlers=checked,
        plugins=chosen,
        dynamo=compiling,
        accumulation=Accumulation(window, found.device),
        loaders=loaders,
        device_placement=device_placement,
        step_scheduler_with_optimizer=step_scheduler_with_optimizer,
        rng_types=None if rng_types is None else check_rng_types(rng_types, found.device),
    )


def resolve_loaders(
    config: DataLoaderConfiguration | None, **given: bool | None
) -> DataLoaderConfiguration:
    """Return a copy of the loader configuration, changed by separate arguments of ``Accelerator``.

    Args:
        config: the argument ``dataloader_config``; None: the defaults.
        **given: fields of the configuration that were passed as arguments of their own, such as
            ``split_batches``. They override ``config`` unless they are None.
    """
    _check_type("dataloader_config", config, DataLoaderConfiguration)
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(config or DataLoaderConfiguration(), **fields)


def resolve_project(
    config: ProjectConfiguration | None, project_dir: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """Return the project configuration, with ``project_dir`` filled in.

    Args:
        config: the argument ``project_config``. It is changed in place, since user code may read
            the folder from its own object. None: the defaults.
    """
    _check_type("project_config", config, ProjectConfiguration)
    config = config or ProjectConfiguration()
    if project_dir is not None and config.project_dir is None:
        config.set_directories(str(project_dir))
    return config


def _check_type(name: str, given: object, expected: type) -> None:
    if given is not None and not isinstance(given, expected):
        raise ConfigError(
            f"{name} is a {type(given).__name__}: expected a {expected.__name__}, or None"
        )


def refuse_unbuilt(others: dict[str, Any]) -> None:
    """Refuse further keyword arguments of ``Accelerator`` that are unknown or not supported.

    Args:
        others: the arguments by name. Those of a strategy's plugin are accepted. Accelerate's
            unsupported ones are accepted only with the values None and "no", which request nothing.
    """
    for name, value in others.items():
        if name in PLUGIN_ARGUMENTS:
            continue
        if name not in UNBUILT:
            raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}")
        if value not in _NOTHING:
            shown = repr(value) if isinstance(value, str) else "..."
            raise ConfigError(f"Accelerator({name}={shown}): {UNBUILT[name]}. Leave it out.")


def check_rng_types(given: Iterable[Any], device: torch.device) -> tuple[str, ...]:
    """Check names of random states ("torch", "generator", "cuda", ...); return them as strings."""
    names = tuple(str(getattr(kind, "value", kind)) for kind in given)
    known = ["torch", "generator"] + [device.type] * (device.type != "cpu")
    for name in names:
        if name not in known:
            raise ConfigError(
                f"rng_types={list(names)} has {name!r}, and this rank, on {device}, has the "
                f"random numbers {', '.join(map(repr, known))}: leave it out"
            )
    return names


_KNOWN = (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


def _check_handlers(handlers: Iterable[KwargsHandler]) -> list[KwargsHandler]:
    """Check the ``kwargs_handlers``, and return them as a list."""
    if not isinstance(handlers, Iterable):
        raise ConfigError(
            f"kwargs_handlers is a {type(handlers).__name__}: expected a list, such as "
            "kwargs_handlers=[AutocastKwargs(...)]"
        )
    checked: list[KwargsHandler] = []
    for handler in handlers:
        if not isinstance(handler, _KNOWN):
            names = ", ".join(kind.__name__ for kind in _KNOWN)
            raise ConfigError(
                f"kwargs_handlers has a {type(handler).__name__}: expected objects of {names}"
            )
        if any(type(other) is type(handler) for other in checked):
            raise ConfigError(f"kwargs_handlers has two {type(handler).__name__}: pass one")
        checked.append(handler)
    return checked
