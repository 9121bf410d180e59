"""A strategy that a user wrote (``own_strategy``) trains, accumulates, saves and resumes as DDP."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import Accelerator
from notebook_accel.training.processes.random_numbers import set_seed
from tests.training import own_strategy
from tests.training.harness import run_ranks


def train(folder, plugins, saves_at=0):
    set_seed(3 + 10 * int(not saves_at), device_specific=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **plugins)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    dataset = torch.arange(64.0).view(32, 2) / 64
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(dataset, 2, shuffle=True)
    )
    accelerator.resume_or_start(folder)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if len(losses) == saves_at:
            accelerator.save_state(folder)
    return losses


def train_all(folder):
    own_strategy.register()
    own = {"plain_plugin": own_strategy.PlainPlugin()}
    here = Path(folder)
    return [
        train(here / "own", own, saves_at=4),
        train(here / "own", own),
        train(here / "ddp", {}, saves_at=4),
    ]


def test_a_users_own_strategy_trains_saves_and_resumes(tmp_path):
    for whole, resumed, by_ddp in run_ranks(train_all, 2, str(tmp_path)):
        assert resumed == whole[4:]
        assert whole == pytest.approx(by_ddp, rel=1e-5)
