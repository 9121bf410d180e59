"""Another user of this machine can neither read a run, nor change it, nor take its port."""

import os
import shutil
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import LaunchError
from notebook_accel.launch.control.metrics_file import MetricStore
from notebook_accel.launch.control.results import StoredResults
from notebook_accel.launch.control.run_folder import RunFolder, run_folders
from notebook_accel.launch.control.run_state import starting
from notebook_accel.launch.template.handle import template
from notebook_accel.rank.this_rank import current
from notebook_accel.system.own_files import open_log
from tests.engines.processes import below
from tests.launches import on_cpu
from tests.waiting import eventually

NOBODY = 65534
SOON = 60.0

pytestmark = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="becoming another user needs root"
)


@pytest.fixture
def shared(monkeypatch):
    """A place for runs that everybody may enter, in a kernel that hides nothing by its umask."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(folder / "runs"))
    before = os.umask(0)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


def as_nobody(act):
    """What ``act`` found in a process of another user."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        found = ["the intruder failed"]
        with suppress(BaseException):
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            found = act()
        os.write(writer, "\n".join(found).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text.splitlines()


def readable(paths):
    """Those that this user can list or read."""
    found = []
    for path in paths:
        with suppress(OSError):
            found += [f"{path}: {os.listdir(path)}"]
        with suppress(OSError), open(path, "rb") as file:
            found += [f"{path}: {file.read(10)!r}"]
    return found


def taken(port):
    """How this user got the port."""
    found = []
    for option in (None, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        for address in ("127.0.0.1", "", "127.0.0.2"):
            with suppress(OSError), socket.socket() as sock:
                if option is not None:
                    sock.setsockopt(socket.SOL_SOCKET, option, 1)
                sock.bind((address, port))
                sock.listen()
                if address != "127.0.0.2":  # another address: nobody connects there
                    found.append(f"{option} {address}")
    return found


def test_another_user_reads_nothing_of_a_run_and_cannot_take_its_port(shared):
    def train(folder):
        print("a secret of mine", flush=True)
        current().metric({"loss": 1.0}, 0)
        # Under its name once it is written, for the reader waits for the name.
        with open(f"{folder}/new{os.environ['RANK']}", "w") as file:
            file.write(os.environ["MASTER_PORT"])
        os.rename(file.name, f"{folder}/{os.environ['RANK']}")
        while not os.path.exists(f"{folder}/go"):
            time.sleep(0.01)
        return 1

    run = on_cpu(train, str(shared), env={"TOKEN": "secret"}, block=False)
    try:
        eventually(
            lambda: all((shared / name).exists() for name in "01") and bool(run.metrics),
            what="both ranks run",
        )
        port = int((shared / "1").read_text())
        processes = [template().pid, *(process.pid for process in below(template().pid))]
        locks = run.log_dir.parent.glob(".kernel-*")
        files = [str(path) for path in (*locks, run.log_dir, *run.log_dir.iterdir())]
        assert len(files) >= 6
        files += [f"/proc/{pid}/{name}" for pid in processes for name in ("environ", "fd", "mem")]
        files += [str(path) for path in Path(tempfile.gettempdir()).glob(f"na-{run.id[-4:]}*")]
        assert as_nobody(lambda: readable(files)) == []
        assert as_nobody(lambda: taken(port)) == []
        assert as_nobody(lambda: readable([str(shared)])) != [], "the intruder is awake"
    finally:
        (shared / "go").touch()
    assert run.wait(SOON).results == [1, 1]
    files = [str(path) for path in (run.log_dir, *run.log_dir.iterdir())]
    assert as_nobody(lambda: readable(files)) == []


def test_a_folder_of_runs_that_another_user_can_change_is_refused(shared):
    root = shared / "new" / "runs"
    RunFolder.make(root)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (root, root.parent)] == [0o700, 0o700]
    assert len(run_folders(root)) == 1
    root.chmod(0o777)
    for refused in (lambda: RunFolder.make(root), lambda: run_folders(root)):
        with pytest.raises(LaunchError, match="other users can write it"):
            refused()
    root.chmod(0o1777)
    RunFolder.make(root)
    theirs = "20200101-000000-abcdef"
    assert as_nobody(lambda: [str(os.mkdir(root.parent.parent / "theirs"))]) == ["None"]
    root.parent.chmod(0o755)
    assert as_nobody(lambda: [str(os.mkdir(root / theirs))]) == ["None"]
    assert theirs not in [folder.id for folder in run_folders(root)]
    for refused in (
        lambda: RunFolder.make(shared / "theirs"),
        lambda: run_folders(shared / "theirs"),
    ):
        with pytest.raises(LaunchError, match="another user"):
            refused()


def test_files_that_another_user_put_into_a_run_are_neither_followed_nor_unpickled(shared):
    folder = RunFolder.make(shared / "runs")
    mine, ran = shared / "mine", shared / "ran"
    mine.write_text("kept")
    mine.chmod(0o600)
    folder.path.chmod(0o777)
    (shared / "runs").chmod(0o755)

    def attack():
        for name in ("begin.part", "config.yaml", "metrics.jsonl", "rank-0.log"):
            os.symlink(mine, folder.path / name)
        code = f"cos\nsystem\n(S'touch {ran}'\ntR.".encode()
        (folder.path / "result-0.pickle").write_bytes(f"[{len(code)}]\n".encode() + code)
        return ["done"]

    assert as_nobody(attack) == ["done"]
    state = starting(run=folder.id, name="train", world_size=1, started=0.0)
    assert "how this run ended" in folder.save(state, LaunchConfig())
    for act in (
        lambda: open_log(folder.path, 0),
        lambda: MetricStore(folder.path),
        lambda: StoredResults(folder.path).get(0),
    ):
        with pytest.raises((OSError, LaunchError)):
            act()
    assert mine.read_text() == "kept"
    assert not ran.exists()
