"""Host B: namespaces of network, mounts, pids and names on this machine, and a cable to it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.waiting import eventually

ADDRESS_A = "10.77.0.1"
ADDRESS_B = "10.77.0.2"
ROOT = Path(__file__).parents[2]
# It has its own HOME, TMPDIR and shared memory, and a disk on which host A's files are not.
_INIT = """
set -e
hostname host-b
mkdir -p {home}/tmp {private}
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs {private}
touch {home}/ready
exec sleep infinity
"""


class HostB:
    """The other host, while it is up; a folder ``private`` is on both, and is not the same."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._home = folder / "home-b"
        self.private = folder / "private"
        self._joined = []

    def boot(self) -> None:
        ip("netns", "add", self._name)
        ip("link", "add", f"{self._name}a", "type", "veth", "peer", "name", f"{self._name}b")
        ip("link", "set", f"{self._name}b", "netns", self._name)
        ip("addr", "add", f"{ADDRESS_A}/24", "dev", f"{self._name}a")
        ip("link", "set", f"{self._name}a", "up")
        ip("-n", self._name, "addr", "add", f"{ADDRESS_B}/24", "dev", f"{self._name}b")
        ip("-n", self._name, "link", "set", f"{self._name}b", "up")
        ip("-n", self._name, "link", "set", "lo", "up")
        script = _INIT.format(home=self._home, private=self.private)
        spaces = ["--mount", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child"]
        command = ["ip", "netns", "exec", self._name, "unshare", *spaces, "sh", "-c", script]
        self._unshare = subprocess.Popen(command)
        eventually((self._home / "ready").exists, within=30, what="host B is up")
        (self._init,) = psutil.Process(self._unshare.pid).children()

    def join(self, address: str, token: str) -> subprocess.Popen[str]:
        joined = self.start("-m", "notebook_accel", "join", address, token=token)
        self._joined.append(joined)
        return joined

    def start(self, *arguments: str, token: str = "") -> subprocess.Popen[str]:
        enter = ["nsenter", "--target", str(self._init.pid), "--net", "--mount", "--pid", "--uts"]
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._home),
            "TMPDIR": str(self._home / "tmp"),
            "PYTHONPATH": str(ROOT),
            "OF_HOST_B": "yes",
            "NOTEBOOK_ACCEL_JOIN_TOKEN": token,
        }
        command = [*enter, sys.executable, *arguments]
        return subprocess.Popen(
            command, env=variables, cwd=self._home, stderr=subprocess.PIPE, text=True
        )

    def kill(self) -> None:
        self._init.send_signal(signal.SIGKILL)
        self._unshare.wait(30)

    def cut(self) -> None:
        ip("link", "set", f"{self._name}a", "down")

    @property
    def processes(self) -> list[psutil.Process]:
        mine = Path(f"/proc/{self._init.pid}/ns/pid").readlink()
        return [
            process
            for process in psutil.process_iter()
            if process.pid != self._init.pid
            and _pid_namespace(process.pid) == mine
            # Of what was orphaned there, the first process reaps nothing.
            and not _is_zombie(process)
        ]

    def take_down(self) -> None:
        if self._unshare.poll() is None:
            self.kill()
        for joined in self._joined:
            joined.kill()
            joined.communicate()
        subprocess.run(["ip", "link", "del", f"{self._name}a"], check=False, capture_output=True)
        ip("netns", "del", self._name)


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _pid_namespace(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink()
    except OSError:
        return None


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def host_b(folder: Path) -> Iterator[HostB]:
    host = HostB(f"na{os.getpid()}", folder)
    host.private.mkdir()
    host.boot()
    try:
        yield host
    finally:
        host.take_down()
