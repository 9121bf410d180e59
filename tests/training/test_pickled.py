"""An Accelerator and what it prepared can be pickled; who unpickles brings the rest."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, DataLoaderConfiguration
from tests.training.harness import run_ranks
from tests.training.single import fresh_rank  # noqa: F401


class Own(Accelerator):
    """As users derive from it, with arguments of its own."""

    def __init__(self, label: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.label = label


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


def train(accelerator: Accelerator, parts: tuple[Any, ...], batches: int) -> list[float]:
    model, optimizer, scheduler, loader = parts
    losses = []
    for _, inputs in zip(range(batches), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_pickled_accelerator_goes_on_as_the_first(precision: str) -> None:
    first = Own(
        "mine",
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
    )
    parts = prepared(first)
    train(first, parts, 6)
    first.register_for_checkpointing(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))
    first.step = 4
    data = pickle.dumps((first, parts))
    expected = train(first, parts, 6)
    second, others = pickle.loads(data)
    assert (type(second), second.label, second.step) == (Own, "mine", 4)
    assert second.mixed_precision == precision
    assert second.gradient_accumulation_steps == 2
    assert isinstance(others[3], OwnLoader)
    assert train(second, others, 6) == expected
    # They are linked as the first ones were: what is saved is what the loop trains.
    assert torch.equal(second.get_state_dict(others[0])["weight"], others[0].weight)
    assert second._prepared.optimizers == [others[1]]
    Accelerator(cpu=True)
    assert [each.gradient_state.num_steps for each in (second, *others[1:])] == [2] * 4


def test_a_loader_is_pickled_in_the_middle_of_a_pass() -> None:
    loader = prepared(Accelerator(cpu=True))[3]
    list(loader)
    running = iter(loader)
    next(running)
    copied = pickle.loads(pickle.dumps(loader))
    assert copied.progress() == (1, 0, 12), "the samples of the epoch that is complete"
    assert len(list(copied)) == 6
    assert len(list(running)) == 5


def on_two_ranks(_: int) -> tuple[list[float], list[float], int]:
    first = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parts = prepared(first)
    train(first, parts, 2)
    data = pickle.dumps((first, parts))
    second, others = pickle.loads(data)
    torch.manual_seed(1)
    return train(first, parts, 3), train(second, others, 3), len(others[3])


def test_ranks_unpickle_what_they_pickled() -> None:
    for first, second, batches in run_ranks(on_two_ranks, 2, 0):
        assert first == second
        assert batches == 3
