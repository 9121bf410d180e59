"""A training that is resumed sees the batches that it would have seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, DataLoaderConfiguration, skip_first_batches
from tests.training.harness import run_ranks
from tests.training.loading import numbers, prepare
from tests.training.single import fresh_rank  # noqa: F401

EPOCHS = 3


def setup(seed: int, **loading: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    config = DataLoaderConfiguration(**loading)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = DataLoader(range(20), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    _, loader = accelerator.prepare(nn.Linear(1, 1), loader)
    return accelerator, loader


def train(
    accelerator: Any, loader: Any, folder: Path, save_at: int | None, done: int = 0
) -> list[list[int]]:
    """Batches of all epochs from step ``done`` on, as scripts write it."""
    seen, step = [], done
    for _ in range(done // len(loader), EPOCHS):
        for batch in loader:
            seen.append(batch.tolist())
            step += 1
            if step == save_at:
                accelerator.save_state(folder)
    return seen


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("save_at", [3, 10, 11, 19, 20])
def test_a_resumed_training_goes_on_with_the_next_batch(
    save_at: int, seedable: bool, tmp_path: Path
) -> None:
    whole = train(*setup(1, use_seedable_sampler=seedable), tmp_path / "state", save_at)
    # It forgot its seed; everything comes from the checkpoint.
    accelerator, loader = setup(2, use_seedable_sampler=seedable)
    accelerator.load_state(tmp_path / "state")
    assert train(accelerator, loader, tmp_path, None, save_at) == whole[save_at:]


def test_a_script_that_skips_by_itself_gets_the_same(tmp_path: Path) -> None:
    whole = train(*setup(1), tmp_path / "state", 13)
    accelerator, loader = setup(2)
    accelerator.load_state(tmp_path / "state")
    rest = [batch.tolist() for batch in skip_first_batches(loader, 3)]
    rest += [batch.tolist() for batch in loader]
    assert rest == whole[13:]


def test_after_an_epoch_the_next_order_comes(tmp_path: Path) -> None:
    accelerator, loader = setup(1)
    first = [batch.tolist() for batch in loader]
    accelerator.save_state(tmp_path / "state")
    second = [batch.tolist() for batch in loader]
    accelerator, loader = setup(1)
    accelerator.load_state(tmp_path / "state")
    assert [batch.tolist() for batch in loader] == second != first


def test_a_loop_that_is_under_way_is_left_alone(tmp_path: Path) -> None:
    accelerator, loader = setup(1)
    for index, _ in enumerate(loader):
        if index == 2:
            accelerator.save_state(tmp_path / "good")
        if index == 5:
            accelerator.load_state(tmp_path / "good")
    assert index == 9
    assert len(list(loader)) == 10


def resumes(folder: str, save_at: int | None) -> Any:
    """On two ranks: whole with a save, or resumed."""
    accelerator, loader = setup(5 if save_at else 6)
    if save_at:
        return train(accelerator, loader, Path(folder), save_at)
    accelerator.load_state(folder)
    return train(accelerator, loader, Path(folder), None, 7)


def test_two_ranks_resume_too(tmp_path: Path) -> None:
    whole = run_ranks(resumes, 2, str(tmp_path / "state"), 7)
    rest = run_ranks(resumes, 2, str(tmp_path / "state"), None)
    assert [one[7:] for one in whole] == rest


def test_other_ranks_go_on_at_the_first_sample_not_seen() -> None:
    alone = prepare(numbers(24, 2))
    batches = iter(alone)
    for _ in range(6):
        next(batches)
    state = alone.state_dict()
    pair = [prepare(numbers(24, 2), rank, 2) for rank in range(2)]
    for loader in pair:
        loader.load_state_dict(state)
    assert [[batch.tolist() for batch in loader] for loader in pair] == [
        [[12, 13], [16, 17], [20, 21]],
        [[14, 15], [18, 19], [22, 23]],
    ]
