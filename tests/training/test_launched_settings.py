"""What ``config=`` says reaches every Accelerator of the function, with no line in it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from notebook_accel import notebook_launcher, set_seed

CONFIG: dict[str, Any] = {
    "num_processes": 2,
    "devices": "cpu",
    "seed": 7,
    "gradient_accumulation_steps": 2,
    "fsdp": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20},
}


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def train() -> dict[str, Any]:
    import random

    import numpy as np
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from notebook_accel import Accelerator

    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)))
    return {
        "drawn": drawn,
        "steps": accelerator.gradient_accumulation_steps,
        "kind": str(accelerator.distributed_type.value),
        "wrapped": [isinstance(layer, FSDPModule) for layer in model],
        "sharded": all(isinstance(weight, DTensor) for weight in model.parameters()),
    }


def test_seed_accumulation_and_fsdp_come_from_the_config() -> None:
    run = notebook_launcher(train, config=CONFIG, view="none")
    set_seed(7)
    expected = {
        "drawn": draw(),
        "steps": 2,
        "kind": "FSDP",
        # The second layer has 18 weights.
        "wrapped": [True, False],
        "sharded": True,
    }
    assert list(run) == [expected, expected]
