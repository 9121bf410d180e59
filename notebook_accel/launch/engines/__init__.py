"""Engines, which start the rank processes of a run: one file for each engine.

A new engine is a new file here, with a class derived from :class:`AgentEngine` of ``local.py`` (or
:class:`Engine` of ``engine.py``), and its row in ``config/engines.py``, the one table of engines.
"""

from __future__ import annotations

from importlib import import_module

from notebook_accel import tpu
from notebook_accel.config import LaunchConfig
from notebook_accel.config.engines import ENGINES
from notebook_accel.launch.engines.engine import Engine


def engine_for(config: LaunchConfig) -> Engine:
    """Return a new engine, chosen by ``config.engine``.

    "auto" chooses "xla" if torch_xla finds a TPU and ``config.devices`` is None, else the local
    engine.
    """
    on_tpu = config.engine == "auto" and config.devices is None and tpu.is_torch_xlas()
    module, _, name = ENGINES["xla" if on_tpu else config.engine].path.partition(":")
    engine: Engine = getattr(import_module(module, __name__), name)()
    return engine
