"""The list of this kernel's runs, which several threads change."""

import os
import threading
from dataclasses import replace

import pytest

from notebook_accel import wire
from notebook_accel.config import LaunchConfig
from notebook_accel.launch import run_list
from notebook_accel.launch.control.call import Call, NewCall
from notebook_accel.launch.control.metrics_file import MetricReader, MetricStore
from notebook_accel.launch.control.run_folder import RunFolder
from notebook_accel.launch.control.run_state import starting
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.run import Run, call_of
from notebook_accel.launch.view import View


def run_in(root):
    """A run that goes on, as far as the list looks at it."""
    folder = RunFolder.make(root)
    state = starting(run=folder.id, name="train", world_size=1, started=0.0)
    metrics = MetricReader(folder.path)
    new = NewCall(
        request=LaunchRequest(config=LaunchConfig(), view=View()),
        state=state,
        folder=folder,
        metrics=metrics,
    )
    return Run(Call(new))


def test_runs_that_begin_at_once_in_two_threads_are_both_listed(tmp_path, monkeypatch):
    first, second = run_in(tmp_path), run_in(tmp_path)
    other = threading.Thread(target=run_list.add, args=(second,))

    def run_without_results(call):
        """In the middle of `add`: the other thread comes now, if it can."""
        if call_of(first) is call:
            other.start()
            other.join(0.2)
        return Run(call)

    monkeypatch.setattr(run_list, "_known", [])
    monkeypatch.setattr(run_list, "Run", run_without_results)
    run_list.add(first)
    other.join()
    assert {*run_list.runs()} == {first, second}


def test_a_run_whose_kernel_ends_while_it_is_read_has_its_own_end(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path))
    folder = RunFolder.make()
    state = starting(run=folder.id, name="train", world_size=1, started=0.0)
    folder.save(replace(state, status="running"))

    def end(_):
        """The kernel saves the end of its run and ends, just before it is asked for."""
        folder.save(replace(state, status="succeeded", ended=1.0))
        return False

    monkeypatch.setattr(RunFolder, "is_held", property(end))
    assert run_list.find_run(folder.id).status == "succeeded"


def test_metrics_that_are_too_large_are_refused_and_still_plotted(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path))
    folder = RunFolder.make()
    folder.save(starting(run=folder.id, name="train", world_size=1, started=0.0))
    store = MetricStore(folder.path)
    store.add([wire.Metric(wall=0.0, rank=0, step=0, values={"loss": 1.0})])
    store.close()
    os.truncate(store.path, 1 << 40)  # the disk holds none of these bytes
    run = run_list.find_run(folder.id)
    with pytest.raises(OSError, match=r"metrics\.jsonl.* 1 GB"):
        _ = run.metrics
    assert [row["name"] for row in call_of(run).metrics.sample()] == ["loss"]


@pytest.mark.timeout(60)
def test_a_fifo_in_the_folder_of_one_run_holds_up_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path))
    monkeypatch.setattr(run_list, "_known", [])
    odd, good = RunFolder.make(), RunFolder.make()
    for folder in (odd, good):
        folder.save(starting(run=folder.id, name="train", world_size=1, started=0.0))
    os.mkfifo(odd.path / "rank-0.log")
    with pytest.raises(OSError, match="not a regular file"):
        odd.read_log(0)
    (odd.path / "begin.msgpack").unlink()
    os.mkfifo(odd.path / "begin.msgpack")
    assert [one.id for one in run_list.runs(everywhere=True)] == [good.id]
