"""Ranks that train on their own between averages."""

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, ParallelismConfig
from notebook_accel.errors import ConfigError
from notebook_accel.training.local_sgd import LocalSGD
from tests.training.harness import on_ranks
from tests.training.meshes import Tiny, accelerator_for


def train(enabled):
    """The weight after each of five steps, and after the block; gradients are 1 and 3."""
    return train_by(Accelerator(cpu=True), local_sgd_steps=2, enabled=enabled)


def train_by(accelerator, *, num_batches=5, **settings):
    """The weight after each batch, and after the block."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.tensor([[1.0 + 2 * accelerator.process_index]])
    weights = []
    with LocalSGD(accelerator, model, **settings) as local:
        for _ in range(num_batches):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
            local.step()
            weights.append(next(model.parameters()).item())
    return [*weights, next(model.parameters()).item()]


@on_ranks(2)
def test_weights_are_averaged_now_and_then_and_at_the_end():
    is_first = Accelerator(cpu=True).is_main_process
    here, there = [-1.0, -4.0, -5.0, -8.0, -9.0, -10.0], [-3.0, -4.0, -7.0, -8.0, -11.0, -10.0]
    assert train(True) == (here if is_first else there)
    assert train(False) == [-2.0, -4.0, -6.0, -8.0, -10.0, -10.0]
    # Windows of two batches in bf16, in which these numbers are exact.
    precision = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}
    windows = train_by(Accelerator(cpu=True, **precision), num_batches=6, local_sgd_steps=4)
    between = [-1.0, -1.0] if is_first else [-3.0, -3.0]
    last = -5.0 if is_first else -7.0
    assert windows == [0.0, *between, -4.0, -4.0, last, -6.0]
    mesh = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2))
    whole = train_by(mesh, local_sgd_steps=2)
    assert whole == (here if is_first else there), "replicas on a mesh are whole models"


def test_one_rank_trains_as_without_it():
    assert train(True) == [-1.0, -2.0, -3.0, -4.0, -5.0, -5.0]


@pytest.mark.parametrize("mesh", ["fsdp", "tensor"])
@on_ranks(2)
def test_models_in_parts_are_refused(mesh):
    accelerator = accelerator_for(mesh)
    with pytest.raises(ConfigError, match="it averages whole models"):
        LocalSGD(accelerator, accelerator.prepare(Tiny()), 2)


@pytest.mark.parametrize("steps", [0, "8"])
def test_no_steps_are_refused(steps):
    with pytest.raises(ConfigError, match=f"sgd_steps={steps!r}: expected a whole number, 1 or m"):
        LocalSGD(Accelerator(cpu=True), nn.Linear(1, 1), steps)
