"""Trials of a sweep and clones take devices that no other run uses."""

import os
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, ConfigError, notebook_launcher, sweep
from notebook_accel.launch import rank_environment, run_list
from tests.waiting import eventually

SOON = 60.0


def visible(number=0, until=""):
    accelerator = Accelerator()
    accelerator.log({"number": number})
    while until and not os.path.exists(until) and not accelerator.should_stop:
        time.sleep(0.01)
    return os.environ.get("SIM_VISIBLE_DEVICES")


def test_a_device_that_a_run_uses_is_given_to_no_trial_and_no_clone(monkeypatch, tmp_path):
    monkeypatch.setenv("SIM_DEVICES", "2")
    monkeypatch.setenv("SIM_READS_CUDA_VISIBLE", "0")
    monkeypatch.setitem(rank_environment.VISIBLE_OF_KIND, "sim", "SIM_VISIBLE_DEVICES")
    until = f"{tmp_path}/over"
    run = notebook_launcher(visible, (7, until), devices=[0], block=False, view="none")
    trials = sweep(visible, {"number": [1, 2, 3]}, view="none")
    assert [trial[0] for trial in trials] == ["1", "1", "1"]
    assert run.status == "running"
    told = notebook_launcher(visible, (4,), 1, view="none").state.notices
    assert f"it shares its devices with other runs of this kernel: {run.id} (visible); " in told[0]
    assert told[0].endswith("devices=[1] takes those that are free")
    assert not notebook_launcher(visible, (4,), devices=[0], view="none").state.notices
    with run_list.choosing:  # as while a sweep chooses
        clones = threading.Thread(target=lambda: made.append(run.clone()), daemon=True)
        made = []
        clones.start()
        clones.join(0.5)
        assert clones.is_alive(), "it chooses after the others"
    clones.join(SOON)
    (other,) = made
    eventually(lambda: bool(other.metrics), within=SOON, what="the clone runs")
    with pytest.raises(ConfigError, match="1 devices are needed, and 0 of 2 are free"):
        run.clone()
    # All are used: a trial waits, and is told for which run.
    waits = sweep(visible, {"number": [4]}, block=False, view="none")
    eventually(
        lambda: "waits for devices of visible" in str(waits._bundle()), within=SOON, what="a note"
    )
    assert len(waits) == 0
    open(until, "w").close()
    assert (run[0], other[0]) == ("0", "1")
    assert waits.wait(SOON)
    assert "waits for" not in str(waits._bundle())


def takes_turns(number):
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 4)
    model, loader = accelerator.prepare(model, DataLoader(torch.randn(60, 4), batch_size=2))
    for step, batch in enumerate(loader):
        accelerator.log({"loss": number + float(model(batch).sum().abs())}, step=step)
        time.sleep(0.1)
    return os.environ.get("SIM_VISIBLE_DEVICES"), step


def test_in_turns_each_trial_keeps_its_device_and_ends(monkeypatch):
    monkeypatch.setenv("SIM_DEVICES", "2")
    monkeypatch.setenv("SIM_READS_CUDA_VISIBLE", "0")
    monkeypatch.setitem(rank_environment.VISIBLE_OF_KIND, "sim", "SIM_VISIBLE_DEVICES")
    found = sweep(takes_turns, {"number": range(5)}, metric="loss", rounds=3, view="none")
    assert [run.status for run in found] == ["succeeded"] * 5
    assert {run[0][0] for run in found} == {"0", "1"}
    assert [run[0][1] for run in found] == [29] * 5
    first = [run.metrics[0]["time"] for run in found]
    last = [run.metrics[-1]["time"] for run in found]
    assert max(first) < min(last), "all are seen before one has ended"
