"""What a launch needs of its parts together, beyond the contract that every engine keeps."""

import atexit
import contextlib
import gc
import itertools
import os
import pickle
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from notebook_accel import (
    Accelerator,
    ConfigError,
    LaunchError,
    NotebookAccelError,
    RunStopped,
    WorkerError,
)
from notebook_accel.config import LaunchConfig
from notebook_accel.launch import payload
from notebook_accel.launch.control.run_folder import RunFolder, run_folders
from notebook_accel.launch.run import call_of
from notebook_accel.launch.run_list import find_run, runs
from notebook_accel.launch.template.handle import template
from notebook_accel.launch.view import View
from notebook_accel.rank.this_rank import current
from tests.descriptors import open_descriptors
from tests.engines.processes import below
from tests.launches import launch, on_cpu
from tests.templates import IMPORT_LITTLE
from tests.waiting import eventually

SOON = 60.0
# `make test-soak` has more, after which descriptors, threads, children, memory are still as many.
ROUNDS = int(os.environ.get("NOTEBOOK_ACCEL_TEST_ROUNDS", "3"))


@pytest.fixture(autouse=True)
def _leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path / "runs"))
    eventually(lambda: not below(template().pid), what="those of an earlier test ended")
    yield
    eventually(lambda: not below(template().pid), what="every process ended")


# ---- nothing listens -----------------------------------------------------------------------


def _listening(pids):
    """Every socket on which one of the processes accepts connections."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    found = []
    for table in ("tcp", "tcp6", "unix"):
        with open(f"/proc/net/{table}") as file:
            rows = [line.split() for line in list(file)[1:]]
        # SO_ACCEPTCON among a unix socket's flags; state 0A is LISTEN.
        at, state, inode = (3, "00010000", 6) if table == "unix" else (3, "0A", 9)
        # The number of a row is another one as soon as anybody on the machine listens.
        found += [row[inode] for row in rows if row[at] == state and row[inode] in inodes]
    return sorted(found)


def _sockets(pid):
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                if target.startswith("socket:["):
                    yield target[8:-1]


def test_no_process_of_a_run_listens(tmp_path):
    def train(folder):
        open(f"{folder}/{os.environ['RANK']}", "w").close()
        while not os.path.exists(f"{folder}/go"):
            time.sleep(0.01)

    before = _listening([os.getpid()])
    run = on_cpu(train, str(tmp_path), block=False)
    eventually((tmp_path / "1").exists, what="ranks run")
    ours = [os.getpid(), template().pid, *(process.pid for process in below(template().pid))]
    assert len(ours) >= 5, "kernel, template, agent and ranks"
    assert all(list(_sockets(pid)) for pid in ours), "their sockets can be seen"
    assert _listening(ours) == before
    (tmp_path / "go").touch()
    run.wait(SOON)


# ---- what a launch leaves in the kernel ----------------------------------------------------


def own_bytes():
    """The memory of this process alone: the system drops pages of files, and reads them again."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def segments():
    """The size in bytes of each segment of a result that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "memfd:notebook_accel" in line]
    return [int(end, 16) - int(start, 16) for start, end in ends]


@pytest.mark.timeout(120 + 5 * ROUNDS)
def test_launches_leave_nothing_behind():
    payload = torch.zeros(500_000)

    def train():
        print("hello")
        return payload + 1

    def fails():
        raise ValueError("no")

    def once():
        on_cpu(train)
        assert float(on_cpu(train)[1][-1]) == 1.0
        with pytest.raises(WorkerError):
            on_cpu(fails)
        gc.collect()

    me = psutil.Process()

    def held():
        return me.num_fds(), threading.active_count(), len(me.children())

    for _ in range(1 + ROUNDS // 10):
        once()
    before, num_bytes = held(), own_bytes()
    for _ in range(ROUNDS):
        once()
    # The handles are all kept, with what the ranks returned. A run's thread may take a moment more,
    # and the one before the first look may have.
    eventually(
        lambda: all(now <= then for now, then in zip(held(), before, strict=True)),
        what=f"no more than before: {before}",
    )
    assert len(segments()) <= 2 * 50, "of both ranks, in the runs that are kept"
    assert own_bytes() - num_bytes < 30_000_000


# ---- a kernel that is busy -----------------------------------------------------------------


class Slow(View):
    """Holds the thread of the run's call until it is let go."""

    def __init__(self):
        self.go_on = threading.Event()

    def update(self, state):
        self.go_on.wait(SOON)


def test_what_a_rank_said_last_waits_for_a_kernel_that_is_far_behind():
    def train(number):
        for step in range(number):
            current().metric({"loss": 1.0}, step)
        return 7

    for number in (4400, 4600):
        view = Slow()
        run = on_cpu(train, number, n=1, view=view, block=False)
        # The agent alone is left, and the kernel does not read.
        eventually(lambda: len(below(template().pid)) == 1, what="the rank has ended")
        view.go_on.set()
        assert run.wait(SOON).results == [7]
        assert len(run.metrics) == number


# ---- being told of the end -----------------------------------------------------------------


def test_done_callbacks_are_called_at_the_end_in_their_order(tmp_path, caplog):
    def train(folder):
        while not Path(folder, "go").exists():
            time.sleep(0.01)
        if Path(folder, "go").read_text() == "fail":
            raise ValueError("no good")
        return 3

    told = []

    def broken(run):
        told.append("broken")
        raise KeyError("chat")

    for how, status in (("end", "succeeded"), ("fail", "failed")):
        folder = tmp_path / how
        folder.mkdir()
        run = on_cpu(train, str(folder), block=False)
        run.add_done_callback(lambda run: told.append((run.status, run.results)))
        with pytest.raises(ConfigError, match=r"add_done_callback\(None\): expected a function"):
            run.add_done_callback(None)
        run.add_done_callback(broken)
        run.add_done_callback(lambda run: told.append(run.id))
        assert told == []
        (folder / "new").write_text(how)
        (folder / "new").rename(folder / "go")
        eventually(lambda run=run: run.id in told, what="all are called")
        results = [3, 3] if how == "end" else [None, None]
        assert told == [(status, results), "broken", run.id]
        told.clear()
        run.add_done_callback(lambda run: told.append("late"))
        assert told == ["late"]
        told.clear()
    assert caplog.text.count("KeyError: 'chat'") == 2


# ---- ends that nobody explains -------------------------------------------------------------


def test_frames_of_libraries_are_folded_in_the_message_and_whole_in_the_log():
    def train():
        print("epoch 1:", end=" ")
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        try:
            model(torch.ones(1, 3))
        except RuntimeError as error:
            raise ValueError("bad batch") from error

    with pytest.raises(WorkerError) as caught:
        on_cpu(train, n=1)
    message, run = str(caught.value), caught.value.run
    assert re.search(
        r"in train\n.*model\(.*\n( +[~^]+\n)?  \.\.\. 6 frames of torch \.\.\.\n", message
    )
    assert "mat1 and mat2" in message
    assert "linear.py" not in message
    assert run.logs(0).startswith("epoch 1: Traceback")
    for whole in (run.logs(0), caught.value.traceback):
        assert "linear.py" in whole
        assert "frames of torch" not in whole


def test_a_rank_that_returned_may_end_as_it_likes():
    def train():
        atexit.register(os._exit, 9)
        return 1

    assert on_cpu(train).results == [1, 1]


@dataclass
class Trained:
    model: Any


def test_a_function_that_ends_in_a_folder_that_is_gone_has_its_result(monkeypatch):
    def train():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            return Trained(torch.nn.Linear(2, 3))

    # As in a kernel: modules are looked for in the working directory first.
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert on_cpu(train)[1].model.out_features == 3


def test_an_exception_of_20_megabytes_is_cut_in_the_cell_and_whole_on_disk():
    def train():
        raise ValueError("begin " + "x" * 20_000_000 + " end")

    with pytest.raises(WorkerError) as caught:
        on_cpu(train, n=1)
    text = str(caught.value)
    assert len(text) < 400_000
    assert "begin xxx" in text
    assert "xxx end" in text
    assert "characters left out" in text
    assert len(caught.value.traceback) < 200_000
    assert len(caught.value.run.logs(0)) > 20_000_000


def test_a_full_log_disk_hides_no_error():
    def train():
        full = os.open("/dev/full", os.O_WRONLY)
        for number in (1, 2):
            os.dup2(full, number)
        print("nobody will read this")
        raise ValueError("the real one")

    with pytest.raises(WorkerError, match="ValueError: the real one") as caught:
        on_cpu(train, n=1)
    [notice] = caught.value.run.state.notices
    assert "disk full: what rank 0 prints is lost" in notice
    assert "NOTEBOOK_ACCEL_RUNS" in notice


def test_what_cannot_travel_back_loses_nothing_beside_it():
    def trains():
        accelerator = Accelerator()
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader([1.0, 2.0]))
        made = {"loader": loader, "lock": threading.Lock(), "model": model, "optimizer": optimizer}
        inner = SimpleNamespace(**made)
        return {"weights": model.module.weight, "trained": inner, "accelerator": accelerator}

    run = on_cpu(trains)
    for result in run.results:
        assert torch.equal(result["weights"], run[0]["weights"])
        model, optimizer = result["trained"].model, result["trained"].optimizer
        assert (type(model), type(optimizer)) == (torch.nn.Linear, torch.optim.SGD)
        assert model.weight is result["weights"] is optimizer.param_groups[0]["params"][0]
        lost = "`result['trained'].loader` (DataLoaderShard), returned, cannot travel"
        assert str(result["trained"].loader).startswith(f"<{lost}")
        with pytest.raises(
            AttributeError, match=r"no attribute 'dataset': .*return values, tensors"
        ):
            _ = result["trained"].loader.dataset
        assert "lock" in repr(result["trained"].lock)
        assert "Accelerator" in repr(pickle.loads(pickle.dumps(result["accelerator"])))
    notices = run.state.notices
    assert [notice.partition(", ")[0] for notice in notices] == [
        "`result['trained'].loader` (DataLoaderShard)",
        "`result['trained'].lock` (_thread.lock)",
        "`result['accelerator']` (Accelerator)",
    ]
    with pytest.raises(WorkerError, match=r"`result` \(_thread.lock\), returned, cannot travel"):
        on_cpu(threading.Lock)


def test_what_cannot_be_made_again_without_its_lock_stays_as_a_whole():
    def trains(nested):
        trained = SimpleNamespace(held=queue.Queue(), weights=torch.ones(2))
        return {"weights": torch.ones(2), "trained": trained} if nested else trained

    trained = on_cpu(trains, False, n=1)[0]
    assert torch.equal(trained.weights, torch.ones(2))
    assert str(trained.held).startswith("<`result.held` (queue.Queue), ")
    result = on_cpu(trains, True, n=1)[0]
    assert torch.equal(result["weights"], torch.ones(2))
    assert str(result["trained"]).startswith("<`result['trained']` (types.SimpleNamespace), ")


def test_a_launch_that_fails_before_its_ranks_keeps_no_copy_of_the_data():
    data = torch.ones(1 << 20)

    def train():
        return data.sum()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = LaunchConfig(num_processes=2, devices="cpu", use_port=taken.getsockname()[1])
        opened = open_descriptors()
        with pytest.raises(LaunchError) as caught:
            launch(train, config=config)
        assert not [one for one in open_descriptors() - opened if "memfd" in one], caught.value


# ---- stop ----------------------------------------------------------------------------------


def test_a_function_that_reads_is_not_interrupted_in_a_long_step(tmp_path):
    def train(asked):
        current().should_stop()
        print("reading", flush=True)
        try:
            while not asked.exists():
                time.sleep(0.01)
            time.sleep(1.4)  # without progress a rank that does not read is interrupted after 1 s
            while not current().should_stop():  # where the agent is held up
                time.sleep(0.01)
        except KeyboardInterrupt:
            return "interrupted"
        return "asked"

    run = on_cpu(train, tmp_path / "asked", block=False)
    eventually(lambda: run.logs().count("reading") == 2, what="both read")
    run.stop()
    (tmp_path / "asked").touch()
    assert run.wait(SOON).results == ["asked", "asked"]
    assert run.status == "stopped"


def train_in_long_steps(folder, seconds, num_before=0):
    context = current()
    path = Path(folder, str(context.rank))
    try:
        for number in itertools.count(1):
            context.count_batch()
            if number == 1:
                time.sleep(seconds)
            while number == num_before and not Path(folder, "told").exists():
                time.sleep(0.01)
            context.count_step()
            with path.open("a") as file:
                file.write("step ")
    except KeyboardInterrupt:
        with path.open("a") as file:
            file.write("interrupted")


@pytest.mark.parametrize(
    ("seconds", "num_before", "waits_for"),
    [(3.0, 2, r"a step of about \d+ s"), (6.5, 1, "its first step")],
)
def test_a_long_step_is_let_finish(seconds, num_before, waits_for, tmp_path):
    run = on_cpu(train_in_long_steps, str(tmp_path), seconds, num_before, block=False, grace=0.5)
    eventually(
        lambda: all(one.batches == num_before for one in run.state.ranks),
        what="they are in that step",
    )
    run.stop()
    said = rf"Stop waits: rank 0 is in {waits_for} \(Stop again interrupts it\)"
    eventually(lambda: re.search(said, "".join(run.state.notices)), what="it is said")
    (tmp_path / "told").touch()
    with pytest.raises(RunStopped):
        run.wait(SOON)
    done = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert done[0] == done[1], "both have left at one step"
    assert set(done[0].split()) == {"step"}
    assert num_before > 1 or done[0] == "step "


def test_a_second_stop_interrupts_a_long_step(tmp_path):
    run = on_cpu(train_in_long_steps, str(tmp_path), 60.0, block=False)
    eventually(lambda: all(one.batches == 1 for one in run.state.ranks), what="first steps")
    run.stop()
    run.stop()
    run.wait(SOON)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["interrupted"] * 2


def test_ranks_that_exit_because_of_their_interrupt_were_stopped(tmp_path):
    def leaves(path):  # as Lightning's Trainer does
        try:
            path.touch()
            time.sleep(600)
        except KeyboardInterrupt:
            sys.exit(1)

    run = on_cpu(leaves, tmp_path / "began", block=False)
    eventually((tmp_path / "began").exists, what="the function runs")
    run.stop()
    with pytest.raises(RunStopped):
        run.wait()
    assert {rank.status for rank in run.state.ranks} == {"stopped"}


def test_times_that_are_none_end_no_run():
    run = on_cpu(time.sleep, 600, n=1, block=False)
    for value in ("3", -1, float("nan"), True, [1]):
        with pytest.raises(ConfigError, match="seconds"):
            run.wait(value)
        with pytest.raises(ConfigError, match="seconds"):
            run.stop(value)
    with pytest.raises(TimeoutError, match="goes on"):
        run.wait(0)
    run.kill()
    with pytest.raises(RunStopped):
        run.wait(SOON)


# ---- views that break ----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["open", "update", "poll", "close", "print_end"])
@pytest.mark.parametrize("block", [True, False])
def test_a_view_that_breaks_ends_no_training(where, block, tmp_path):
    called = tmp_path / "called"

    def train():
        while where in ("open", "update", "poll") and not called.exists():
            time.sleep(0.01)
        return 1

    def fail(*_):
        called.touch()
        raise ZeroDivisionError

    with patch.object(View, where, autospec=True, side_effect=fail):
        assert on_cpu(train, n=1, view=View(), block=block).wait(SOON).results == [1]
    assert called.exists()


# ---- a launch that cannot begin ------------------------------------------------------------


def test_a_payload_that_cannot_be_sealed_leaves_nothing(monkeypatch, tmp_path):
    on_cpu(lambda: 1)
    weights = torch.zeros(1_000_000)
    before, opened = (sorted(os.listdir(tmp_path / "runs")), len(runs())), open_descriptors()
    with monkeypatch.context() as patch:
        full = OSError(24, "Too many open files")
        patch.setattr(payload, "pack", lambda *_, **__: (_ for _ in ()).throw(full))
        with pytest.raises(LaunchError, match="too many files open: its limit is"):
            on_cpu(lambda: weights)
        full = OSError(12, "Cannot allocate memory")
        with pytest.raises(LaunchError, match=r"Cannot allocate memory.*launch again"):
            on_cpu(lambda: weights)
    assert (sorted(os.listdir(tmp_path / "runs")), len(runs())) == before
    assert not open_descriptors() - opened


# ---- runs that were, here and elsewhere ----------------------------------------------------


def test_a_large_result_goes_with_its_last_handle():
    def train():
        return torch.ones(25_000_000)

    gc.disable()
    try:
        run = on_cpu(train, n=1)
        assert float(run[0].sum()) == 25_000_000
        assert max(segments()) >= 100_000_000, "no copy of it"
        number, tensor = run.id, weakref.ref(run[0])
        del run
        assert tensor() is None
        assert max(segments(), default=0) < 100_000_000
    finally:
        gc.enable()
    left = runs()[-1]
    assert (left.id, left.status, left.results) == (number, "succeeded", [None])
    with pytest.raises(NotebookAccelError, match="Keep the handle"):
        left[0]
    with pytest.raises(NotebookAccelError, match="Launch again"):
        left.export("anything.py")


def test_what_a_run_was_given_goes_with_its_last_handle(tmp_path):
    class Big:
        pass

    big = Big()
    seen = weakref.ref(big)

    def train(given, folder):
        while not os.path.exists(f"{folder}/go"):
            time.sleep(0.01)
        return given is not None

    run = on_cpu(train, big, str(tmp_path), n=1, block=False)
    del big
    assert seen() is not None, "for run.export"
    del run
    gc.collect()
    assert seen() is None, "also while it goes on"
    (tmp_path / "go").touch()
    assert runs()[-1].wait(SOON).status == "succeeded"


def test_a_launch_that_raised_is_in_the_list_with_its_results(tmp_path):
    def train(go):
        if os.environ["RANK"] == "1":
            while not go.exists():
                time.sleep(0.01)
            raise ValueError("no")
        return 7

    class Watching(View):
        def update(self, state):
            if state.ranks[0].returned:
                (tmp_path / "go").touch()

    with contextlib.suppress(WorkerError):
        on_cpu(train, tmp_path / "go", view=Watching())
    gc.collect()
    assert runs()[-1].results == [7, None]
    with pytest.raises(WorkerError, match="ValueError: no"):
        runs()[-1].wait()


def test_a_run_whose_handle_is_held_outlives_all_newer_ones(tmp_path):
    def train():
        print("still here")
        current().metric({"loss": 1.0}, 0)

    root = tmp_path / "runs"
    at_open = []

    class Counting(View):
        def open(self, run):
            at_open.append(len(run_folders(root)))

    for _ in range(60):
        RunFolder.make(root)
    run = on_cpu(train, n=1, view=Counting())
    # Old ones go, but not before the ranks are on their way: nobody waits for that.
    assert (at_open, len(run_folders(root))) == ([61], 50)
    for _ in range(120):
        RunFolder.make(root).remove_old()
    assert run.logs(0) == "still here\n"
    assert len(run.metrics) == 1
    shutil.rmtree(run.log_dir)
    for read in (run.logs, lambda: run.metrics, run.to_pandas, lambda: run.logs(0), run.plot):
        with pytest.raises(FileNotFoundError, match="was deleted"):
            read()


def test_the_end_of_a_log_is_whole_lines():
    def train():
        for number in range(1000):
            print("line", number)

    run = on_cpu(train, n=2)
    of_one = run.logs(1)
    logs = call_of(run).logs
    assert logs(1, 1_000_000) == of_one
    last = logs(1, 100)
    assert 80 < len(last) <= 100
    assert of_one.endswith(f"\n{last}")
    of_all = logs(None, 200)
    lines = last.splitlines()
    assert of_all.splitlines() == [f"[rank {rank}] {line}" for rank in (0, 1) for line in lines]


EARLIER = """
import contextlib, os, signal, sys, time
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.launcher import launch
from notebook_accel.launch.launch_request import LaunchRequest

def train(how):
    from pathlib import Path
    from notebook_accel.rank import this_rank
    rank, folder = this_rank.current().rank, Path(os.environ["NOTEBOOK_ACCEL_RUNS"]).parent
    print("from an earlier kernel", flush=True)
    this_rank.current().metric({"loss": float("nan")}, 3)
    # Before one of them fails, which soon ends the other, both have said this.
    (folder / f"new {rank}").write_text(str(os.getpid()))
    (folder / f"new {rank}").rename(folder / f"{how} {rank}")
    while how != "ends" and not (folder / f"{how} {1 - rank}").exists():
        time.sleep(0.01)
    if how == "fails":
        raise ValueError("as it was then")
    if how == "is killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "is killed":
        status = Path("/proc", (folder / f"{how} 1").read_text(), "stat")
        with contextlib.suppress(OSError):  # once nobody waits for its end any more
            while ") Z " not in status.read_text():
                time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")
    while how == "goes on":
        time.sleep(0.05)

config = LaunchConfig(num_processes=2, devices="cpu", env={"TOKEN": "secret"})
for how in ("ends", "fails", "is killed", "goes on"):
    run = launch(LaunchRequest(function=train, args=(how,), config=config, block=False))
    if how != "goes on":
        run.results
    while "earlier" not in run.logs(1) or len(run.metrics) < 2:
        time.sleep(0.05)
    print(run.id, flush=True)
sys.stdin.read()
"""


def test_runs_of_other_kernels(capsys):
    def found(number):
        return next(run for run in runs(everywhere=True) if run.id == number)

    command = [sys.executable, "-c", IMPORT_LITTLE + EARLIER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        ended, failed, killed, going = (other.stdout.readline().strip() for _ in range(4))
        run = found(going)
        assert run.status in ("starting", "running")
        for ask in (run.wait, lambda: run.results, lambda: run[0]):
            with pytest.raises(NotebookAccelError, match="in the notebook that launched it"):
                ask()
        other.kill()
    failures = [(number, "failed") for number in (failed, killed, going)]
    for number, status in ((ended, "succeeded"), *failures):
        run = found(number)
        assert run not in runs()
        assert (run.name, run.world_size, run.status) == ("train", 2, status)
        assert run.logs(1).startswith("from an earlier kernel\n")
        assert {row["step"] for row in run.metrics} == {3}
        assert (run.config.num_processes, run.config.env) == (2, None)
        written = [file.read_bytes() for file in run.log_dir.iterdir()]
        assert b"secret" not in b"".join(written)
        assert run.results == [None, None]
        with pytest.raises(NotebookAccelError):
            run[0]
        run.show()
        run.show(0)
        shown = capsys.readouterr().out
        assert shown.startswith(f"train: {status}, 2 ranks")
        assert shown.endswith("rank 0 displayed nothing\n")
    with pytest.raises(WorkerError, match="as it was then"):
        found(failed).wait()
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL") as caught:
        found(killed).wait()
    told = caught.value
    assert (told.rank, told.ranks, told.signal) == (1, [1], "SIGKILL")
    with pytest.raises(WorkerError, match="its kernel ended"):
        found(going).wait()


# ---- environment ---------------------------------------------------------------------------


def test_what_the_person_sets_for_the_ranks_wins(monkeypatch, tmp_path):
    monkeypatch.setenv("KEPT", "from the notebook")
    monkeypatch.setenv("JPY_SESSION_NAME", "kernel's own")
    monkeypatch.setenv("WORLD_SIZE", "77")
    # Python passes over it, and so do the ranks.
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/elsewhere")])

    of_rank = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "JPY_SESSION_NAME": None}
    expected = {"KEPT": "from the notebook", "MINE": "from the call", **of_rank}

    def train():
        assert all(isinstance(entry, str) for entry in sys.path)
        # As in a process that began with them, not as in the one from which it was forked.
        effects = tempfile.gettempdir(), time.strftime("%z", time.localtime(0))
        return {name: os.environ.get(name) for name in expected}, effects

    env = {"MINE": "from the call", "WORLD_SIZE": "5", "TMPDIR": str(tmp_path), "TZ": "XYZ-3"}
    assert on_cpu(train, env=env)[1] == (expected, (str(tmp_path), "+0300"))
    assert os.environ["WORLD_SIZE"] == "77"


# ---- notices -------------------------------------------------------------------------------


def test_copies_that_ran_on_their_own_are_named():
    def alone():
        import torch  # noqa: F401

    def uses_the_notebooks():
        return torch.get_num_threads()

    def has_nothing_to_train():
        return 1

    def together():
        dist.init_process_group("gloo")
        dist.destroy_process_group()

    for function in (alone, uses_the_notebooks):
        told = on_cpu(function).state.notices
        assert [line for line in told if f"2 copies of {function.__name__}" in line]
    assert not [line for line in on_cpu(alone, n=1).state.notices if "copies" in line]
    assert not [line for line in on_cpu(together).state.notices if "copies" in line]
    assert on_cpu(has_nothing_to_train).state.notices == ()


def test_notices_are_shown_once_whoever_says_them():
    def train():
        for _ in range(2):
            current().notice("mind the step")

    notices = on_cpu(train, notices=["known before"]).state.notices
    assert notices[:2] == ("known before", "mind the step")
    assert notices.count("mind the step") == 1


# ---- bad input starts nothing --------------------------------------------------------------


def test_devices_that_there_are_not():
    with pytest.raises(ConfigError, match=r"devices=\[990\]") as caught:
        launch(lambda: 1, config=LaunchConfig(devices=[990]))
    assert "devices='cpu'" in str(caught.value)


def test_a_run_is_found_by_its_id_whatever_was_launched_since():
    run, _ = (on_cpu(lambda: 5, n=1) for _ in range(2))
    assert find_run(run.id) is run
    assert run in runs()
    with pytest.raises(NotebookAccelError, match="no run 'nothing'"):
        find_run("nothing")
