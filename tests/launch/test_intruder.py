"""Another user of this machine can neither read a run nor take its port."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.launch.template.handle import template
from notebook_accel.launch.view import View
from tests.engines.processes import below
from tests.launches import launch
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOBODY = 65534
SOON = 60.0

pytestmark = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="becoming another user needs root"
)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for runs that everybody may enter, in a kernel that hides nothing by its umask."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(folder / "runs"))
    before = os.umask(0)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


def as_nobody(act: Callable[[], list[str]]) -> list[str]:
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


def readable(paths: list[str]) -> list[str]:
    """Those that this user can list or read."""
    found = []
    for path in paths:
        with suppress(OSError):
            found += [f"{path}: {os.listdir(path)}"]
        with suppress(OSError), open(path, "rb") as file:
            found += [f"{path}: {file.read(10)!r}"]
    return found


def taken(port: int) -> list[str]:
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


def test_another_user_reads_nothing_of_a_run_and_cannot_take_its_port(shared: Path) -> None:
    def train(folder: str) -> int:
        from notebook_accel.launch import rank

        print("a secret of mine", flush=True)
        rank.current().metric({"loss": 1.0}, 0)
        # Under its name once it is written, for the reader waits for the name.
        with open(f"{folder}/new{os.environ['RANK']}", "w") as file:
            file.write(os.environ["MASTER_PORT"])
        os.rename(file.name, f"{folder}/{os.environ['RANK']}")
        while not os.path.exists(f"{folder}/go"):
            time.sleep(0.01)
        return 1

    config = LaunchConfig(num_processes=2, devices="cpu", env={"TOKEN": "secret"})
    run = launch(train, (str(shared),), config=config, view=View(), block=False)
    try:
        eventually(
            lambda: all((shared / name).exists() for name in "01") and bool(run.metrics),
            within=SOON,
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
