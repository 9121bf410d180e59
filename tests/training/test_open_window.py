"""A checkpoint of the middle of an accumulation window: what resumes from it reads it again.

Each is written in the background, while the ranks train on.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import Accelerator
from tests.training.harness import run_ranks, runs_here, skip_unless_it_runs
from tests.training.resuming import train

SAMPLES, WINDOW = 12, 3
STOP = 11  # batches: in the second window of the second epoch, whose first batch is number 3
LAYOUTS = {None: 2, "fsdp, blocks": 2, "tensor": 2, "1F1B": 2, "single": 1}  # and their ranks


def train_all(folder, layouts, stop, in_background=True):
    """In windows of three of an epoch's six batches; one that stops saves after each batch."""
    asked = {"samples": SAMPLES, "window": WINDOW, "stop": stop, "dropout": True}
    asked |= {"saves": lambda _: bool(stop), "in_background": in_background}
    return {layout: train(f"{folder}/{layout}", layout, **asked) for layout in layouts}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By layout, what each rank saw of a training that was never stopped, of one that saved and
    stopped, and of the one that went on."""
    root, found = tmp_path_factory.mktemp("windows"), {}
    for ranks in (1, 2):
        layouts = [name for name, needed in LAYOUTS.items() if needed == ranks and runs_here(name)]
        attempts = [
            run_ranks(train_all, ranks, str(root / folder), layouts, stop, timeout=150)
            for folder, stop in (("whole", 0), ("stopped", STOP), ("stopped", 0))
        ]
        of_ranks = list(zip(*attempts, strict=True))
        found |= {name: [[one[name] for one in rank] for rank in of_ranks] for name in layouts}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_resumes_ends_at_the_curve_that_was_never_stopped(layout, trained):
    skip_unless_it_runs(layout)
    for whole, before, after in trained[layout]:
        start = after["start"]
        assert (start.epoch, start.batch, start.step, start.samples) == (1, 3, 3, 18)
        assert list(after["losses"]) == ["1 3", "1 4", "1 5"], "the window is read again"
        assert {**before["losses"], **after["losses"]} == whole["losses"]


@pytest.mark.parametrize("stop", [1, 2, 5, 7, 8, 11])
def test_a_window_draws_the_same_random_numbers_again(stop, tmp_path):
    whole, before, after = (
        train_all(tmp_path / folder, ["single"], stop, False)["single"]["losses"]
        for folder, stop in (("whole", 0), ("stopped", stop), ("stopped", 0))
    )
    assert len(before) + len(after) == SAMPLES + stop % WINDOW
    assert {**before, **after} == whole


def test_a_save_between_backward_and_step_loses_no_batch(tmp_path):
    def run(stops):
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        inner, loader = nn.Linear(1, 1), DataLoader(torch.arange(6.0)[:, None])
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(inner, optimizer, loader)
        start = accelerator.resume_or_start(tmp_path / "run")
        seen = []
        for batch in loader:
            seen.append(batch.item())
            accelerator.backward(model(batch).mean())
            if stops and len(seen) in (3, 6):
                accelerator.save_state(tmp_path / "run" / str(len(seen)))
                if len(seen) == 6:
                    break
            optimizer.step()
            optimizer.zero_grad()
        return start, seen

    run(stops=True)
    start, seen = run(stops=False)
    assert (start.epoch, start.batch, start.samples) == (0, 5, 5), "the last batch of the epoch"
    assert seen == [5.0]
