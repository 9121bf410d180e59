"""Launches that go on from where a run was stopped, or from a checkpoint, in real processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_accel import ConfigError, FullyShardedDataParallelPlugin, LaunchConfig, WorkerError
from notebook_accel.launch.resuming import folder_to_resume
from tests.launches import launch
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_accel.launch.run import Run

SOON = 60.0
NUM_BATCHES = 30


def train(
    rate: float = 0.01,
    *,
    width: int = 16,
    is_slow: bool = False,
    fsdp: bool = False,
    own: str | None = None,
) -> dict[str, Any]:
    """Train two epochs with all that a checkpoint has; return the losses and rates of each step."""
    from notebook_accel import Accelerator, set_seed

    set_seed(3)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    data = torch.randn(2 * NUM_BATCHES * accelerator.num_processes, 8)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    start = None if own is None else accelerator.resume_or_start(own)
    losses, rates = [], []
    for epoch in range(start.epoch if start else 0, 2):
        for inputs in loader:
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
            if is_slow:
                accelerator.log({"loss": losses[-1]}, step=len(losses))
                time.sleep(0.03)
        if epoch == 0 and own and not start.step:
            accelerator.save_state()
    return {"losses": losses, "rates": rates, "start": start}


def start(*args: Any, ranks: int = 2, **asked: Any) -> Run:
    return launch(train, args, config=LaunchConfig(num_processes=ranks), **asked)


def stopped(**kwargs: Any) -> Run:
    run = start(block=False, kwargs={"is_slow": True, **kwargs})
    eventually(lambda: run.state.ranks[0].steps > 5, within=SOON, what="some steps")
    run.stop()
    assert run.results == [None, None]
    assert run.status == "stopped"
    return run


@pytest.mark.parametrize(
    "fsdp", [False, pytest.param(True, marks=pytest.mark.long)], ids=["ddp", "fsdp"]
)
def test_a_stopped_run_goes_on_to_the_bit(fsdp: bool) -> None:
    whole = start(kwargs={"fsdp": fsdp}).results
    run = stopped(fsdp=fsdp)
    done = run.state.ranks[0].steps
    again = start(kwargs={"fsdp": fsdp}, resume=folder_to_resume(run))
    for one, other in zip(again.results, whole, strict=True):
        # Epochs count anew: what is left of the first, and two more.
        rest = NUM_BATCHES - done
        assert one["losses"][:rest] == other["losses"][done:NUM_BATCHES]
        assert one["losses"][: rest + NUM_BATCHES] == other["losses"][done:]
        assert one["rates"][: rest + NUM_BATCHES] == other["rates"][done:]
    notices = [one for one in again.state.notices if "goes on from" in one]
    assert len(notices) == 1
    assert f"step {done}" in notices[0]
    assert f"at batch {done}" in notices[0]


def test_a_new_rate_wins_and_the_schedule_keeps_its_place(tmp_path: Path) -> None:
    run = stopped(own=str(tmp_path / "first"))
    done = run.state.ranks[0].steps
    asked = {"kwargs": {"own": str(tmp_path / "second")}, "resume": folder_to_resume(run)}
    again = start(0.001, **asked)
    for one in again:
        assert one["start"].step == one["start"].batch == done
        assert len(one["losses"]) == 2 * NUM_BATCHES - done
        expected = [0.001 * 0.81**step for step in range(done + 1, 2 * NUM_BATCHES + 1)]
        assert one["rates"] == pytest.approx(expected)


def test_the_newest_checkpoint_of_a_run_or_a_folder_goes_before_the_functions_own(
    tmp_path: Path,
) -> None:
    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    run = start(kwargs={"own": own})
    assert folder_to_resume(run) == run.state.checkpoint == f"{own}/checkpoint_0"
    start(kwargs={"own": other})
    again = start(kwargs={"own": other}, resume=folder_to_resume(own))
    for one, whole in zip(again, run, strict=True):
        assert one["start"].folder == f"{own}/checkpoint_0"
        assert one["losses"] == whole["losses"][NUM_BATCHES:]


def test_shapes_that_differ_are_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    run = start(kwargs={"own": str(tmp_path)})
    with pytest.raises(WorkerError) as caught:
        start(kwargs={"width": 8}, resume=folder_to_resume(run))
    text = str(caught.value)
    assert "nothing was loaded" in text
    assert "size mismatch for 0.weight: (16, 8) there, (8, 8) in the model" in text


def test_what_cannot_be_gone_on_from_is_refused(tmp_path: Path) -> None:
    run = start()
    for source, words in [
        (run, "It wrote no checkpoint"),
        (str(tmp_path), "no checkpoint in it"),
        (tmp_path / "none", "no such folder"),
        (3, "expected a run"),
    ]:
        with pytest.raises(ConfigError, match=words):
            folder_to_resume(source)
