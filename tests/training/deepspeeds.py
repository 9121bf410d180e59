"""Training by DeepSpeed on real ranks, several cases a launch: a rank imports it once.

DeepSpeed's import and its first engine take a rank some seconds, a case after that 0.1 to 1 s.
"""

from __future__ import annotations

from typing import Any

from notebook_accel import Accelerator, DeepSpeedPlugin
from tests.training import meshes

__all__ = ["KINDS", "accelerator_for", "train"]

# What the user asks for, by name.
KINDS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0},
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "stage 2, states on the host": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
    "stage 3, all on the host": {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
    },
}


def accelerator_for(kind: str, **settings: Any) -> Accelerator:
    plugin = DeepSpeedPlugin(**KINDS[kind])
    return Accelerator(cpu=True, deepspeed_plugin=plugin, **settings)


def train(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each case comes to by each kind; a case is one of ``meshes``."""
    seen: dict[str, dict[str, Any]] = {}
    for kind, fields in KINDS.items():
        # One plugin for all: what was filled in for one case does not count for the next.
        plugin = {"deepspeed_plugin": DeepSpeedPlugin(**fields)}
        meshes.LAYOUTS["zero"] = (2, 2, lambda plugin=plugin: plugin)  # type: ignore[misc]
        seen[kind] = {name: meshes.train("zero", case) for name, case in cases.items()}
    return seen
