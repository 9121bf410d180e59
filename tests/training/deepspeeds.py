"""Training by DeepSpeed on real ranks, several cases a launch: a rank imports it once.

DeepSpeed's import and its first engine take a rank some seconds, a case after that 0.1 to 1 s.
"""

from __future__ import annotations

import sys
from typing import Any

from notebook_accel import Accelerator, DeepSpeedPlugin
from tests.training import meshes

__all__ = ["KINDS", "accelerator_for", "compute_in_fp16", "step_in_fp16", "train"]

# What the user asks for, by name.
KINDS: dict[str, dict[str, Any]] = {
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
        one = DeepSpeedPlugin(**fields)
        one.deepspeed_config["fp16"] = {"enabled": "auto", "initial_scale_power": 8}
        plugin = {"deepspeed_plugin": one}
        meshes.LAYOUTS["zero"] = (2, 2, lambda plugin=plugin: plugin)  # type: ignore[misc]
        seen[kind] = {}
        for name, case in cases.items():
            if case.get("precision") == "fp16":
                compute_in_fp16()
            seen[kind][name] = meshes.train("zero", case)
    return seen


def compute_in_fp16() -> None:
    """DeepSpeed, imported before, refuses CPUs whose fp16 torch emulates."""
    device = sys.modules["deepspeed"].accelerator.get_accelerator()
    device.is_fp16_supported = lambda: True


def step_in_fp16(kind: str, scale_power: int) -> tuple[bool, bool]:
    """Whether a step by such a loss scale was left out, and whether the weights stayed."""
    plugin = DeepSpeedPlugin(**KINDS[kind])
    plugin.deepspeed_config["fp16"] = {"enabled": "auto", "initial_scale_power": scale_power}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="fp16")
    model, optimizer = meshes.make({"optimizer": "sgd"})
    model, optimizer = accelerator.prepare(model, optimizer)
    before = meshes.weights_of(accelerator, model)
    accelerator.forward_backward(model, *meshes.data(4).tensors, meshes.loss_of)
    optimizer.step()
    return optimizer.step_was_skipped, meshes.weights_of(accelerator, model) == before
