"""Training by DeepSpeed on real ranks, several cases a launch: a rank imports it once.

DeepSpeed's import and its first engine take a rank some seconds, a case after that 0.1 to 1 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel import Accelerator, DeepSpeedPlugin
from tests.training import meshes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["accelerator_for", "train"]


def accelerator_for(stage: int, *, plugin: Any = None, **settings: Any) -> Accelerator:
    plugin = DeepSpeedPlugin(zero_stage=stage) if plugin is None else plugin
    return Accelerator(cpu=True, deepspeed_plugin=plugin, **settings)


def train(stages: Sequence[int], cases: dict[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What each case comes to in each stage; a case is one of ``meshes``."""
    seen: dict[int, dict[str, Any]] = {}
    for stage in stages:
        # One plugin for all: what was filled in for one case does not count for the next.
        plugin = {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage)}
        meshes.LAYOUTS["zero"] = (2, 2, lambda plugin=plugin: plugin)  # type: ignore[misc]
        seen[stage] = {name: meshes.train("zero", case) for name, case in cases.items()}
    return seen
