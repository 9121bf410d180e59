"""Training a model without its DDP wrapper, which exchanges no gradients, is named."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from notebook_accel import Accelerator
from tests.training.harness import run_ranks

WAYS = {
    "wrapper": lambda accelerator, model: model,
    "forward": lambda accelerator, model: model.forward,
    "module": lambda accelerator, model: model.module,
    "unwrapped": lambda accelerator, model: accelerator.unwrap_model(model),
}


def train(way: str) -> list[str]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    called = WAYS[way](accelerator, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            accelerator.backward(called(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught if "without its wrapper" in str(one.message)]


def test_training_without_the_wrapper_is_named_once() -> None:
    # Rank 0 warns for the machine.
    said = {way: run_ranks(train, 2, way)[0] for way in WAYS}
    assert {way: len(lines) for way, lines in said.items()} == {
        "wrapper": 0,
        "forward": 0,
        "module": 1,
        "unwrapped": 1,
    }
    assert said["module"][0].startswith("Linear is trained without its wrapper")
