"""A person stops a training in a notebook, goes on with another rate, and clones a trial warm."""

import os
import signal

import pytest

from tests.kernel.notebooks import SLOW, open_notebook
from tests.waiting import eventually

TRAIN = """
import time
import torch
from notebook_accel import Accelerator, find_run, last_run, notebook_launcher, runs

def train(lr, width=4, size=2400):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = torch.utils.data.DataLoader(torch.ones(size, 1), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = 0
    for x in loader:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen += 1
        accelerator.log({"seen": seen})
        time.sleep(0.05 if lr == 0.1 else 0)
    return seen, optimizer.param_groups[0]["lr"]
"""
BEGIN = """
run = notebook_launcher(train, (0.1,), 2, block=False)
while run.state.ranks[0].steps < 10:
    time.sleep(0.01)
"""
GO_ON = "notebook_launcher(train, kwargs={'lr': 0.01}, num_processes=2, resume=%s)"


@pytest.mark.timeout(300)
def test_a_run_is_paused_stopped_and_goes_on_in_this_kernel_and_another(notebook):
    with open_notebook() as other:
        notebook.run(TRAIN + BEGIN)
        other.run(TRAIN)
        notebook.run("run.pause()")
        assert "paused" in other.run("print(runs(everywhere=True))")
        notebook.run("run.go_on()")
        assert "running" in other.run("print(runs(everywhere=True))")
        notebook.run("run.stop(); run.results; done = run.state.ranks[0].steps")
        notebook.run(f"again = {GO_ON % 'last_run()'}")
        ended = notebook.fails("run.pause()")
        assert "the run has ended" in ended
        assert "run.py" not in ended, "no frame of the package"
        run_id, done, *results = notebook.value("[run.id, done, *again.results]")
        assert results == [(600 - done, 0.01)] * 2
        assert f"begins at batch {done}" in notebook.run("print(again.state.notices)")
        # That run is the newest now, and has ended well.
        assert "It wrote no checkpoint" in notebook.fails(GO_ON % "last_run()")
        wider = (GO_ON % "run").replace("0.01", "0.01, 'width': 8")
        wrong = notebook.fails(wider)
        assert "size mismatch for 0.weight: (4, 1) there, (8, 1) in the model" in wrong
        assert other.value(f"{GO_ON % f'find_run({run_id!r})'}.results") == results
        notebook.run("clone = run.clone(lr=0.02, size=40)")
        cloned = notebook.value("clone.wait().results, clone.name")
        assert cloned == ([(10, 0.02), (10, 0.02)], "lr=0.02, size=40")


def test_a_paused_run_ends_with_an_interrupt_a_rank_or_its_kernel():
    with open_notebook() as notebook:
        kernel = notebook.kernel
        notebook.run(TRAIN)
        cell = notebook.start("notebook_launcher(train, (0.1,), 2)")
        kernel.wait_for_panel()
        # Before the first batch a pause would have no training to keep.
        assert kernel.listen_until(lambda: shows(kernel, "seen"), seconds=60)
        kernel.click("Pause")
        assert kernel.listen_until(lambda: named(kernel, "Go on") == 1, seconds=30)
        notebook.interrupt()
        assert "KeyboardInterrupt" in notebook.finish(cell).traceback[-1]
        kept = "kept = last_run()\nkept.status, kept.rescued.missing, kept.state.paused_seconds > 0"
        assert notebook.value(kept) == ("stopped", [], True)
        notebook.run(BEGIN + "run.pause()\nimport os, signal\nos.kill(run.pids[1], signal.SIGKILL)")
        assert "rank 1 was killed by SIGKILL" in notebook.fails("run.wait()")
        notebook.run(BEGIN + "run.pause()")
        os.kill(notebook.pid, signal.SIGKILL)
        notebook.expect(0, but=0, within=SLOW)


TURNED = """
import time
from notebook_accel import Accelerator, notebook_launcher
from notebook_accel.actions import common_actions

def turned(folder):
    accelerator = Accelerator(cpu=True)
    rate = accelerator.knob("rate", 0.5, low=0.0, high=1.0)
    while not accelerator.should_stop:
        while (folder / "stand").exists():
            (folder / f"{accelerator.process_index} stands").touch()
            time.sleep(0.01)
        time.sleep(0.01)
    return rate.value
"""


def test_of_a_hundred_moves_of_a_slider_the_last_counts_and_one_that_no_rank_hears_goes_back(
    notebook, tmp_path
):
    kernel = notebook.kernel
    notebook.run(f"{TURNED}\nfrom pathlib import Path\nfolder = Path({str(tmp_path)!r})")
    notebook.run("run = notebook_launcher(turned, (folder,), 2, block=False)")
    kernel.wait_for_panel()
    assert kernel.listen_until(lambda: named(kernel, "rate") == 1, seconds=60)
    rate = lambda: [m["value"] for m in kernel.models.values() if m.get("description") == "rate"]  # noqa: E731

    def stand_still():
        (tmp_path / "stand").touch()
        for rank in range(2):
            file = tmp_path / f"{rank} stands"
            file.unlink(missing_ok=True)
            eventually(file.exists, within=60, what="it comes to no point")

    moves = [number / 100 for number in range(101)]
    stand_still()
    for value in moves:
        kernel.fill("rate", value)
        if value == 0.6:
            # The kernel has heard these.
            assert kernel.listen_until(lambda: rate() == [0.6], seconds=30)
            (tmp_path / "stand").unlink()
    notebook.run("while run.state.knobs['rate'].value != 1.0: time.sleep(0.01)")
    values = notebook.value("[row['value'] for row in run.metrics if row['name'] == 'knob/rate']")
    assert values == sorted(values)
    assert {*values} <= {*moves}
    assert len(values) < 60, "the newest of those that wait"

    notebook.run("common_actions.POINT_SECONDS = 1.0")
    stand_still()
    kernel.fill("rate", 0.25)
    refused = "rate: set: the ranks did not come to a common point within 1 s"
    assert kernel.listen_until(lambda: shows(kernel, refused), seconds=60)
    assert kernel.listen_until(lambda: rate() == [1.0], seconds=30)
    notebook.run("common_actions.POINT_SECONDS = 30.0")
    (tmp_path / "stand").unlink()
    kernel.click("Stop")
    assert notebook.run("print(run.results)") == "[1.0, 1.0]\n"


@pytest.mark.timeout(300)
def test_a_warm_clone_of_a_trial_trains_what_the_trial_had_not(notebook):
    kernel = notebook.kernel
    notebook.run(TRAIN + "from notebook_accel import sweep")
    how = "metric='seen', mode='max', concurrent=2, devices='cpu', block=False"
    notebook.run(f"s = sweep(train, {{'lr': [0.1]}}, {how})")
    kernel.wait_for_panel()
    assert kernel.listen_until(lambda: offers(kernel, "trial 0"), seconds=60)
    notebook.run("while s.runs[0].state.ranks[0].steps < 10: time.sleep(0.01)")
    kernel.fill("Trial", "trial 0")
    assert kernel.listen_until(lambda: "Clone" in kernel.buttons, seconds=60)
    kernel.click("Clone")
    assert kernel.listen_until(lambda: named(kernel, "lr") == 1, seconds=30)
    kernel.fill("lr", 0.01)
    kernel.fill("warm", True)
    kernel.click("Start")
    notebook.run("while len(s) < 2: time.sleep(0.01)")
    notebook.run("clone = s.runs[1].wait(); s.stop(); s.wait()")
    seen, rate, noticed = notebook.value("[*clone.results[0], str(clone.state.notices)]")
    assert rate == 0.01
    assert 10 <= 1200 - seen < 1200, "it goes on from a step of the trial"
    assert f"begins at batch {1200 - seen}" in noticed


# The last trial begins its turn once the click was heard.
HELD = """
from pathlib import Path
from notebook_accel import sweep

def held(lr, width, size):
    while width == 4 and not clicked.exists():
        time.sleep(0.01)
    return train(lr, width, size)
"""


def test_a_paused_trial_gets_the_next_free_device_by_mouse(notebook, tmp_path):
    kernel = notebook.kernel
    notebook.run(f"{TRAIN}{HELD}\nclicked = Path({str(tmp_path / 'clicked')!r})")
    space = "{'lr': [0.1], 'size': [800], 'width': [2, 3, 4]}"
    how = "metric='seen', mode='max', concurrent=1, rounds=8, devices='cpu', block=False"
    notebook.run(f"s = sweep(held, {space}, {how})")
    kernel.wait_for_panel()
    assert kernel.listen_until(lambda: offers(kernel, "trial 2"), seconds=60)
    kernel.fill("Trial", "trial 1")
    kernel.click("Next")
    notebook.run("while not s._trials[1].is_next: time.sleep(0.01)")
    (tmp_path / "clicked").touch()
    went_on = notebook.value(
        """
        numbers = lambda: [len(run.metrics) for run in s.runs[:2]]
        paused = numbers()
        while numbers() == paused:
            time.sleep(0.05)
        [now > then for now, then in zip(numbers(), paused)]
        """
    )
    assert went_on == [False, True], "without a click it was trial 0's turn"
    notebook.run("s.stop(); s.wait()")


def shows(kernel, words):
    return any(words in str(model.get("value")) for model in kernel.models.values())


def named(kernel, label):
    return sum(model.get("description") == label for model in kernel.models.values())


def offers(kernel, option):
    return any(option in model.get("_options_labels", ()) for model in kernel.models.values())
