"""The table of strategies (kinds of parallelism), and the plugins by which users choose them.

A :class:`~notebook_accel.training.strategies.base.Request` holds the user's plugins and
settings and the number of ranks. ``STRATEGIES`` has a condition for each strategy;
:func:`make_strategy` takes the first strategy whose condition holds for the request.

A new strategy is a file with its class, and a line in ``STRATEGIES``. If users choose it by an
argument ``Accelerator(new_plugin=...)``, the file also has the plugin, a subclass of
:class:`StrategyPlugin`, with a line in ``PLUGIN_ARGUMENTS``. ``Accelerator`` accepts every argument
of that table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from notebook_accel.errors import ConfigError
from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.settings.handlers import StrategyPlugin
from notebook_accel.training.settings.parallelism import ParallelismConfig
from notebook_accel.training.strategies.base import ModelToPrepare, PrepareCall, Request, Strategy
from notebook_accel.training.strategies.deepspeed_plugin import DeepSpeedPlugin

__all__ = [
    "PLUGIN_ARGUMENTS",
    "STRATEGIES",
    "Choice",
    "ModelToPrepare",
    "PrepareCall",
    "Request",
    "Strategy",
    "StrategyPlugin",
    "make_strategy",
    "resolve_plugins",
]


class Choice(NamedTuple):
    """A strategy's class ``name`` in ``module``.

    The first choice that is asked for is taken.
    """

    is_asked_for: Callable[[Request], bool]
    module: str
    """Relative to this package, or whole. It is imported when it is chosen: torch's sharding alone
    costs a second and more, which a rank that does not use it is spared."""
    name: str


# In order: what was asked for by name comes before what follows from the number of ranks.
STRATEGIES = {
    "xla": Choice(lambda request: request.topology.device.type == "xla", ".xla", "XlaParallel"),
    "deepspeed": Choice(
        lambda request: "deepspeed_plugin" in request.plugins, ".deepspeed", "DeepSpeedZero"
    ),
    "pipeline": Choice(lambda request: "pp" in request.mesh_dims, ".pipeline", "PipelineParallel"),
    # Replicas alone are plain data parallelism (DDP).
    "mesh": Choice(
        lambda request: (
            request.topology.num_processes > 1
            and ("fsdp_plugin" in request.plugins or not request.mesh_dims <= {"dp_replicate"})
        ),
        ".mesh",
        "MeshParallel",
    ),
    "ddp": Choice(lambda request: request.topology.num_processes > 1, ".ddp", "DDPStrategy"),
    "single": Choice(lambda _: True, ".base", "Strategy"),
}

# Arguments of ``Accelerator`` by which users choose a strategy.
PLUGIN_ARGUMENTS: dict[str, type[StrategyPlugin]] = {
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "parallelism_config": ParallelismConfig,
    "deepspeed_plugin": DeepSpeedPlugin,
}


def resolve_plugins(arguments: Mapping[str, Any]) -> dict[str, StrategyPlugin]:
    """Return the plugins in use, by the name of the ``Accelerator`` argument."""
    resolved = {
        name: kind.resolve(name, arguments.get(name)) for name, kind in PLUGIN_ARGUMENTS.items()
    }
    plugins = {name: plugin for name, plugin in resolved.items() if plugin is not None}
    if len(plugins) > 1 and not all(plugin.composes for plugin in plugins.values()):
        raise ConfigError(
            f"{' and '.join(plugins)} were given (arguments or environment), which do not compose: "
            "pass one of them"
        )
    return plugins


def make_strategy(request: Request) -> Strategy:
    """Import and make the first strategy in ``STRATEGIES`` whose condition the request meets."""
    choice = next(choice for choice in STRATEGIES.values() if choice.is_asked_for(request))
    module = importlib.import_module(choice.module, __name__)
    strategy: Strategy = getattr(module, choice.name)(request)
    return strategy
