"""A checkpoint of the middle of an accumulation window: what resumes from it reads it again."""

import shutil
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, GradientAccumulationPlugin
from tests.training.harness import run_ranks, runs_here, skip_unless_it_runs
from tests.training.meshes import FLOAT_ERROR
from tests.training.resuming import train

SAMPLES, WINDOW = 12, 3
STOP = 11  # batches: in the second window of the second epoch, whose first batch is number 3
Case = tuple[str | None, str]
CASES = [*product([None, "fsdp, blocks", "1F1B"], ["sgd", "adamw"])]
ALONE = ("single", "adamw")


def train_all(places, stop):
    """In windows of three of an epoch's six batches; one that stops saves once, at its end."""
    return {
        folder: train(
            folder,
            layout,
            samples=SAMPLES,
            window=WINDOW,
            optimizer=optimizer,
            saves=lambda number: number == stop,
            stop=stop,
        )
        for folder, (layout, optimizer) in places.items()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each rank saw: of trainings that were never stopped, by case; of those that saved; and
    of those that went on, by the case that saved and the case that loaded."""
    root = tmp_path_factory.mktemp("windows")
    found = {}

    def run(places, stop):
        for ranks, is_alone in ((2, False), (1, True)):
            cases = {key: _reader(key) for key in places if (_reader(key) == ALONE) is is_alone}
            at = {str(places[key]): case for key, case in cases.items()}
            seen = run_ranks(train_all, ranks, at, stop, timeout=150)
            found.update({key: [each[str(places[key])] for each in seen] for key in cases})

    all_cases = [case for case in (*CASES, ALONE) if runs_here(case)]
    names = {case: "-".join(map(str, case)) for case in all_cases}
    run({("whole", case): root / "whole" / name for case, name in names.items()}, 0)
    run({("saved", case): root / "saved" / name for case, name in names.items()}, STOP)
    pairs = [(case, case) for case in all_cases]
    pairs += [((None, "adamw"), ALONE), (("fsdp, blocks", "adamw"), ALONE), (ALONE, CASES[1])]
    goes_on = {}
    for writer, reader in pairs:
        place = root / "rest" / f"{names[writer]} {names[reader]}"
        shutil.copytree(root / "saved" / names[writer], place)
        goes_on["rest", writer, reader] = place
    run(goes_on, 0)
    return found


def _reader(key):
    return key[-1]


@pytest.mark.parametrize("case", [*CASES, ALONE])
def test_what_resumes_ends_at_the_curve_that_was_never_stopped(case, trained):
    skip_unless_it_runs(case)
    ranks = zip(
        trained["whole", case], trained["saved", case], trained["rest", case, case], strict=True
    )
    for whole, before, after in ranks:
        start = after["start"]
        assert (start.epoch, start.batch, start.step, start.samples) == (1, 3, 3, 18)
        assert list(after["losses"]) == ["1 3", "1 4", "1 5"], "the window is read again"
        assert {**before["losses"], **after["losses"]} == whole["losses"]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [((None, "adamw"), ALONE), (("fsdp, blocks", "adamw"), ALONE), (ALONE, (None, "adamw"))],
)
def test_so_does_another_number_of_ranks(writer, reader, trained):
    expected = trained["whole", writer][0]["losses"]
    for after in trained["rest", writer, reader]:
        assert (after["start"].epoch, after["start"].batch) == (1, 3)
        for key, loss in after["losses"].items():
            assert loss == pytest.approx(expected[key], abs=100 * FLOAT_ERROR)


# ---- one process


def train_with_dropout(folder, stop=0, **window):
    plugin = GradientAccumulationPlugin(num_steps=3, **window)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model, optimizer, loader = accelerator.prepare(
        inner,
        torch.optim.SGD(inner.parameters(), lr=1e-3),
        DataLoader(torch.arange(24.0).view(12, 2), shuffle=True),
    )
    start = accelerator.resume_or_start(folder)
    seen = {}
    for epoch in range(start.epoch, 2):
        begin = start.batch if epoch == start.epoch else 0
        for batch, inputs in enumerate(loader, begin):
            with accelerator.accumulate(model):
                loss = model(inputs).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            seen[f"{epoch} {batch}"] = [*inputs[0].tolist(), loss.item()]
            if len(seen) == stop:
                accelerator.save_state(folder)
                return seen
    return seen


@pytest.mark.parametrize("stop", [1, 2, 5, 13, 14, 20])
def test_a_window_draws_the_same_random_numbers_again(stop, tmp_path):
    before = train_with_dropout(tmp_path / "state", stop)
    after = train_with_dropout(tmp_path / "state")
    assert len(before) + len(after) == 24 + stop % 3
    assert {**before, **after} == train_with_dropout(tmp_path / "none")


def test_a_save_between_backward_and_step_loses_no_batch(tmp_path):
    def run(stops):
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        inner = nn.Linear(1, 1)
        model, optimizer, loader = accelerator.prepare(
            inner,
            torch.optim.SGD(inner.parameters(), lr=0.1),
            DataLoader(torch.arange(6.0)[:, None]),
        )
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
