"""What can be pickled of a training, and what cannot."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, ConfigError
from tests.training.single import fresh_rank  # noqa: F401


class OwnLoader(DataLoader[Any]):
    """A loader class of a library."""


def half(step: int) -> float:
    return 0.5**step


def prepared(accelerator: Accelerator) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, half)
    loader = OwnLoader(torch.arange(24.0).reshape(12, 2), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    return accelerator.prepare(model, optimizer, scheduler, loader)  # type: ignore[no-any-return]


def test_an_accelerator_says_that_it_stays_in_its_process() -> None:
    with pytest.raises(ConfigError, match="Make one in the process that needs it"):
        pickle.dumps(Accelerator(cpu=True))


def test_a_loader_is_pickled_in_the_middle_of_a_pass() -> None:
    loader = prepared(Accelerator(cpu=True))[3]
    list(loader)
    running = iter(loader)
    next(running)
    copied = pickle.loads(pickle.dumps(loader))
    assert copied.progress() == (1, 0, 12), "the samples of the epoch that is complete"
    assert len(list(copied)) == 6
    assert len(list(running)) == 5
