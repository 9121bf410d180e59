"""The folder of a run: what is kept, what goes, and what is never touched."""

import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock
from uuid import uuid4

import numpy as np
import pytest

from notebook_accel import LaunchError
from notebook_accel.launch.control import run_folder
from notebook_accel.launch.control.metrics_file import MetricStore
from notebook_accel.launch.control.results import StoredResults
from notebook_accel.launch.control.run_folder import RunFolder, run_folders, runs_folder
from notebook_accel.launch.control.run_state import starting
from notebook_accel.launch.payload import pack, pack_result
from notebook_accel.system.own_files import log_path
from tests.descriptors import open_descriptors

KEPT = 50


def ended(root):
    """A run that nobody holds any more."""
    folder = RunFolder.make(root)
    folder.remove_old()
    return folder.path


def date_new_runs(monkeypatch, date):
    """Give all runs that are made from here on this date."""
    monkeypatch.setattr(f"{run_folder.__name__}.new_run_id", lambda: f"{date}-{uuid4().hex[:6]}")


def names(root):
    return sorted(entry.name for entry in root.iterdir() if not entry.name.startswith(".kernel-"))


# ---- where ---------------------------------------------------------------------------------


def test_runs_are_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path / "mine"))
    assert runs_folder() == tmp_path / "mine"
    folder = RunFolder.make()
    assert folder.path == tmp_path / "mine" / folder.id
    assert folder.path.stat().st_mode & 0o077 == 0, "logs are the person's own"


def test_the_platforms_folder_otherwise(monkeypatch):
    monkeypatch.delenv("NOTEBOOK_ACCEL_RUNS")
    assert runs_folder().is_absolute()
    assert "notebook-accel" in runs_folder().parts


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=f"{tmp_path}/file.*NOTEBOOK_ACCEL_RUNS"):
        RunFolder.make(tmp_path / "file")
    for error in (PermissionError(13, "Permission denied"), OSError(28, "No space left")):
        monkeypatch.setattr("pathlib.Path.mkdir", Mock(side_effect=error))
        with pytest.raises(LaunchError, match=f"{tmp_path}/runs.*NOTEBOOK_ACCEL_RUNS"):
            RunFolder.make(tmp_path / "runs")


def test_runs_of_the_same_second_stand_in_the_order_of_their_launches(tmp_path):
    made = [RunFolder.make(tmp_path).id for _ in range(20)]
    assert [folder.id for folder in run_folders(tmp_path)] == made


# ---- which are kept ------------------------------------------------------------------------


def test_a_run_of_another_process_is_kept_while_it_lives(tmp_path, monkeypatch):
    script = (
        "import sys, pathlib\n"
        "from notebook_accel.launch.control.run_folder import RunFolder\n"
        "folder = RunFolder.make(pathlib.Path(sys.argv[1]))\n"
        "print(folder.id, flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        name = other.stdout.readline().strip()
        date_new_runs(monkeypatch, "29990101-000000")
        for _ in range(KEPT + 2):
            ended(tmp_path)
        assert name in names(tmp_path)
        # It dies as a killed kernel does: the lock goes with it, the mark stays.
        other.kill()
        other.wait()
    assert (tmp_path / name / ".live").exists()
    ended(tmp_path)
    assert name not in names(tmp_path)


def test_what_is_not_a_run_is_never_removed(tmp_path):
    foreign = ["data", "2024", "0", "20240101-experiments", "20240101-000000-results", "-"]
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    (tmp_path / "notes.txt").touch()
    target = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    target.mkdir()
    (target / "precious").touch()
    (tmp_path / "20200101-000000-abcdef").symlink_to(target)
    for _ in range(KEPT + 5):
        ended(tmp_path)
    assert {*foreign, "notes.txt"} <= set(names(tmp_path))
    assert all((tmp_path / name / "precious").exists() for name in foreign)
    assert (target / "precious").exists()
    assert len(names(tmp_path)) == KEPT + len(foreign) + 2


def test_a_child_that_was_forked_lets_go_of_nothing(tmp_path):
    folder = RunFolder.make(tmp_path)
    child = os.fork()
    if not child:
        del folder
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.is_held


def test_held_runs_cost_one_descriptor_together(tmp_path):
    RunFolder.make(tmp_path)
    before = open_descriptors()
    held = [RunFolder.make(tmp_path) for _ in range(KEPT + 20)]
    assert not open_descriptors() - before
    assert all(folder.is_held for folder in held)
    assert len(set(names(tmp_path))) >= KEPT + 20


def test_more_than_two_gigabytes(tmp_path, monkeypatch):
    made = []
    for number in range(6):
        date_new_runs(monkeypatch, f"20260101-0000{number:02d}")
        made.append(ended(tmp_path))
        with log_path(made[-1], 0).open("wb") as file:
            file.truncate(700_000_000)
    held = RunFolder.make(tmp_path)
    with log_path(held.path, 0).open("wb") as file:
        file.truncate(5_000_000_000)
    ended(tmp_path)
    assert [path.exists() for path in made] == [False, False, False, False, True, True]
    assert held.path.exists()


def test_locks_of_dead_kernels_are_swept(tmp_path):
    (tmp_path / ".kernel-0123456789ab").touch()
    os.utime(tmp_path / ".kernel-0123456789ab", (0, 0))
    held = RunFolder.make(tmp_path)
    held.remove_old()
    left = [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".kernel-")]
    assert len(left) == 1
    assert held.is_held


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("NOTEBOOK_ACCEL_RUNS")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    # What Python gives where neither HOME nor the list of users knows one.
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(LaunchError, match="NOTEBOOK_ACCEL_RUNS"):
        RunFolder.make()
    assert not os.path.exists("~")


# ---- logs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"", ""),
        (b"10%\r20%\r30%\nnext", "30%\nnext"),
        (b"trailing\r\nwindows\r\n", "trailing\nwindows\n"),
        ("früh\n".encode(), "früh\n"),
        (b"bad \xff byte", "bad \N{REPLACEMENT CHARACTER} byte"),
        (b"form\x0cfeed\x1cand more\n", "form\x0cfeed\x1cand more\n"),
    ],
)
def test_a_log_is_read_as_a_terminal_would_show_it(written, shown, tmp_path):
    folder = RunFolder.make(tmp_path)
    log_path(folder.path, 3).write_bytes(written)
    assert folder.read_log(3) == shown
    assert folder.read_log(4) == ""


# ---- what cannot be written ----------------------------------------------------------------


def test_a_last_state_that_is_damaged_leaves_the_first(tmp_path):
    folder = RunFolder.make(tmp_path)
    state = starting(run=folder.id, name="train", world_size=1, started=0.0)
    folder.save(state)
    folder.save(replace(state, status="succeeded", ended=1.0))
    (folder.path / "state.msgpack").write_bytes(b"")
    assert folder.load() == replace(state, began=None)


def test_what_cannot_be_made_in_a_new_folder_is_a_launch_error(tmp_path):
    session, gone = RunFolder.make(tmp_path), RunFolder.make(tmp_path)
    session.make_logs(1)
    gone.remove()
    for make in (
        lambda: MetricStore(gone.path),
        lambda: gone.make_logs(1),
        lambda: gone.link_logs(session, 1),
    ):
        with pytest.raises(LaunchError, match="NOTEBOOK_ACCEL_RUNS"):
            make()


def test_folders_of_other_users_are_not_listed(tmp_path, monkeypatch):
    folder = RunFolder.make(tmp_path)
    assert [found.id for found in run_folders(tmp_path)] == [folder.id]
    monkeypatch.setattr("os.geteuid", lambda: folder.path.stat().st_uid + 1)
    assert run_folders(tmp_path) == []


def test_a_damaged_state_hides_no_other_run(tmp_path):
    folder = RunFolder.make(tmp_path)
    folder.save(starting(run=folder.id, name="training", world_size=1, started=1.0))
    path = folder.path / "begin.msgpack"
    whole = path.read_bytes()
    for damaged in (b"", whole[:-5], whole.replace(b"training", b"\xff" * 8), b"\x91" * 100_000):
        path.write_bytes(damaged)
        assert folder.load() is None


# ---- results -------------------------------------------------------------------------------


def keep(folder, value):
    results = StoredResults(folder)
    packet, fds = pack(pack_result(value))
    results.keep(1, packet, list(fds))
    return results


@pytest.mark.parametrize("length", [3, 1_000_000])
def test_a_result_is_read_by_another_process(tmp_path, length):
    before = open_descriptors()
    keep(tmp_path, {"weights": np.arange(length), "name": "net"})
    read = StoredResults(tmp_path)
    assert read.has(1)
    assert not read.has(0)
    assert read.get(1)["name"] == "net"
    assert read.get(1) is read.get(1)
    weights = read.get(1)["weights"]
    weights += 1  # its memory is this process's own
    assert weights[-1] == length
    assert not open_descriptors() - before
    assert os.listdir(tmp_path) == ["result-1.pickle"]
    assert (tmp_path / "result-1.pickle").stat().st_mode & 0o077 == 0


def test_a_damaged_result_is_refused(tmp_path):
    keep(tmp_path, np.arange(1000))
    path = tmp_path / "result-1.pickle"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match="not all there"):
        StoredResults(tmp_path).get(1)


def test_a_result_that_cannot_be_written_is_told(tmp_path):
    results = keep(tmp_path / "deleted", 1)
    assert not results.has(1)
    assert "logs and metrics are lost" in results.lost[0]
