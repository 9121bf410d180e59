"""What the tests of processes share: a look at who is still alive."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from notebook_accel.config.checks import too_old_torch


def below(pid: int) -> list[psutil.Process]:
    try:
        return [p for p in psutil.Process(pid).children(recursive=True) if _lives(p)]
    except psutil.NoSuchProcess:
        return []


def gone(pids: Iterable[int]) -> bool:
    return not any(_lives_pid(pid) for pid in pids)


def of_launches(kernel: int) -> list[psutil.Process]:
    """Templates, agents and ranks of a kernel that has set ``NOTEBOOK_ACCEL_RUNS``."""
    runs = ("NOTEBOOK_ACCEL_RUNS", os.environ["NOTEBOOK_ACCEL_RUNS"])
    return [
        process
        for process in psutil.process_iter()
        if (_began_with(process.pid, *runs) or _serves(process, kernel))
        and _lives(process)
        and process.pid != kernel
    ]


def _serves(process: psutil.Process, kernel: int) -> bool:
    try:
        return bool(re.search(rf"serve\(\d+, {kernel}\)$", process.cmdline()[-1]))
    except (psutil.Error, IndexError):
        return False


def marked(name: str, value: str) -> list[psutil.Process]:
    """Living processes that began with this variable, whatever their session, parent or program."""
    return [p for p in psutil.process_iter() if _began_with(p.pid, name, value) and _lives(p)]


def _began_with(pid: int, name: str, value: str) -> bool:
    """Whether a process began with this variable; read as it is, since all are asked."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{name}={value}".encode() in variables.split(b"\0")


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _lives_pid(pid: int) -> bool:
    try:
        return _lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def files_left(folder: str | Path) -> list[str]:
    # Torch 2.9 makes an empty folder as it is imported.
    of_torch = ("torchinductor", "tmp") if too_old_torch((2, 11)) else ("torchinductor",)
    return [name for name in os.listdir(folder) if not name.startswith(of_torch)]
