"""How the processes of a run come about: one file an engine, and the one table of them.

A new engine is a new file here, with a class derived from :class:`AgentEngine` of ``local.py`` (or
:class:`Engine` of ``base.py``), and a line in :data:`ENGINES`, by which the settings (``config/``)
know it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel import tpu
from notebook_accel.launch.engines.elastic import ElasticEngine
from notebook_accel.launch.engines.inline import InlineEngine
from notebook_accel.launch.engines.local import LocalEngine
from notebook_accel.launch.engines.ray import RayEngine
from notebook_accel.launch.engines.xla import XlaEngine

if TYPE_CHECKING:
    from notebook_accel.config import LaunchConfig
    from notebook_accel.launch.engines.base import Engine

__all__ = ["ENGINES", "engine_for"]

ENGINES: dict[str, type[Engine]] = {
    "auto": LocalEngine,
    "local": LocalEngine,
    "elastic": ElasticEngine,
    "ray": RayEngine,
    "inline": InlineEngine,
    "xla": XlaEngine,
}


def engine_for(config: LaunchConfig) -> Engine:
    """A new engine of the name in the settings; "auto" is the one that fits."""
    if config.engine == "auto" and config.devices is None and tpu.is_torch_xlas():
        return XlaEngine()
    return ENGINES[config.engine]()
