"""Ranks that train on their own between averages."""

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, ParallelismConfig
from notebook_accel.errors import ConfigError
from notebook_accel.training.local_sgd import LocalSGD
from tests.training.harness import run_ranks
from tests.training.meshes import Tiny, accelerator_for
from tests.training.single import forget_states


def train(enabled):
    """The weight after each of five steps, and after the block; gradients are 1 and 3."""
    return train_by(Accelerator(cpu=True), local_sgd_steps=2, enabled=enabled)


def train_by(accelerator, *, num_batches=5, **settings):
    """The weight after each batch, and after the block."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
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


def train_all():
    precision = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}
    windows = train_by(Accelerator(cpu=True, **precision), num_batches=6, local_sgd_steps=4)
    replicas = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2))
    on_mesh = train_by(replicas, local_sgd_steps=2)
    return [train(True), train(False), windows, on_mesh]


def test_weights_are_averaged_now_and_then_and_at_the_end():
    here, there = run_ranks(train_all, 2)
    assert here[0] == [-1.0, -4.0, -5.0, -8.0, -9.0, -10.0]
    assert there[0] == [-3.0, -4.0, -7.0, -8.0, -11.0, -10.0]
    assert here[1] == there[1] == [-2.0, -4.0, -6.0, -8.0, -10.0, -10.0]
    # Windows of two batches in bf16, in which these numbers are exact.
    assert here[2] == [0.0, -1.0, -1.0, -4.0, -4.0, -5.0, -6.0]
    assert there[2] == [0.0, -3.0, -3.0, -4.0, -4.0, -7.0, -6.0]
    assert (here[3], there[3]) == (here[0], there[0]), "replicas on a mesh are whole models"


def test_one_rank_trains_as_without_it():
    assert train(True) == [-1.0, -2.0, -3.0, -4.0, -5.0, -5.0]


def refusals():
    said = []
    for mesh in ("fsdp", "tensor"):
        accelerator = accelerator_for(mesh)
        model = accelerator.prepare(Tiny())
        try:
            LocalSGD(accelerator, model, 2)
        except ConfigError as error:
            said.append(str(error))
        accelerator.free_memory()
        forget_states()
    return said


def test_models_in_parts_are_refused():
    for said in run_ranks(refusals, 2):
        assert len(said) == 2
        assert all("it averages whole models" in text for text in said)


@pytest.mark.parametrize("steps", [0, "8"])
def test_no_steps_are_refused(steps):
    with pytest.raises(ConfigError, match=f"sgd_steps={steps!r}: expected a whole number, 1 or m"):
        LocalSGD(Accelerator(cpu=True), nn.Linear(1, 1), steps)
