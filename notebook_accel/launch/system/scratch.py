"""What multiprocessing puts on disk while a run works, and who removes it.

A DataLoader worker hands its batches over through a socket that has a name, in a folder that the
process removes when it ends; its queues have semaphores, and its tensors shared memory, whose
names it removes at once. One that is killed removes nothing. So all processes of a run share one
folder and one prefix for names, and whoever sees them end removes what is left: the agent, its
template, or the kernel. The folder is not beside the logs, since not every file system has sockets;
its name is no longer than the one that Python would take, since the path of a socket may have about
100 bytes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_accel.launch.system import processes

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["remove", "use"]

# Of a run's name, from its end: the microsecond in which it was made, and a random digit.
_NUM_CHARACTERS = 6
_SHARED = Path("/dev/shm")


def use(run: str) -> None:
    """Have this process, and those that it starts, take the names of ``run``."""
    # Where multiprocessing looks (util.get_temp_dir, SemLock._make_name); children inherit it.
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"/{_name(run)}"
    with contextlib.suppress(OSError):
        os.mkdir(_folder(run), 0o700)
        config["tempdir"] = str(_folder(run))


def remove(run: str, *, used_by: Collection[int]) -> None:
    """Remove what is left of ``run``, whose processes ``used_by`` have ended."""
    shutil.rmtree(_folder(run), ignore_errors=True)
    for path in _SHARED.glob(f"sem.{_name(run)}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
    _remove_tensors(used_by)


def _remove_tensors(pids: Collection[int]) -> None:
    """Remove shared tensors of dead processes: torch names them for a moment after their maker."""
    # A process that lives under this pid is a newer one, which has the number now.
    prefixes = tuple(f"torch_{pid}_" for pid in pids if not processes.lives(pid))
    with contextlib.suppress(OSError):
        for name in os.listdir(_SHARED):
            if name.startswith(prefixes):
                with contextlib.suppress(OSError):  # another user's, or just removed
                    (_SHARED / name).unlink()


def _folder(run: str) -> Path:
    return Path(tempfile.gettempdir()) / _name(run)


def _name(run: str) -> str:
    return f"na-{run[-_NUM_CHARACTERS:]}"
