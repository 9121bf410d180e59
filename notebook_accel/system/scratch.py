"""Temporary files of an agent and its ranks outside of the run's folder, and their removal.

An agent is the process that starts the ranks of a run on one machine. A DataLoader worker of a rank
hands its batches over through sockets in a temporary folder, semaphores and shared memory. A
process that ends in order removes these files, but one that is killed does not. So all processes of
an agent share one scratch folder and one prefix for names. The process that sees them end removes
the remaining files: the agent, its template (the process that forked it), or the kernel. Each agent
has a scratch folder of its own, since a run may have several agents on one machine, which end one
by one.

The scratch folder is not in the run's folder, whose file system may not support sockets. Its name
is as short as those of Python's own temporary folders, since the path of a socket may have about
100 bytes at most.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from notebook_accel.private import of_libraries
from notebook_accel.system import processes

# Of a run's name, from its end: digits of the microsecond in which it was made, and a random one.
_NUM_CHARACTERS = 4
_SHARED = Path("/dev/shm")


def use(run: str) -> None:
    """Give this process, an agent of ``run``, its own scratch folder and prefix for names."""
    agent = os.getpid()
    # Where multiprocessing looks (util.get_temp_dir, SemLock._make_name); children inherit it.
    config = of_libraries.process_settings()
    config["semprefix"] = f"/{_name(run, agent)}"
    with contextlib.suppress(OSError):
        os.mkdir(folder(run, agent), 0o700)
        config["tempdir"] = str(folder(run, agent))


def folder(run: str, agent: int) -> Path:
    """Return the scratch folder of an agent of ``run``; ``agent`` is the agent's pid."""
    return Path(tempfile.gettempdir()) / _name(run, agent)


def remove(run: str, agent: int, *, used_by: Collection[int]) -> None:
    """Remove the temporary files that an agent and its ranks have left behind."""
    shutil.rmtree(folder(run, agent), ignore_errors=True)
    for path in _SHARED.glob(f"sem.{_name(run, agent)}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
    # Tensors in shared memory. A process that lives under a pid is a newer one, which has the
    # number now.
    prefixes = tuple(f"torch_{pid}_" for pid in used_by if not processes.lives(pid))
    with contextlib.suppress(OSError):
        for name in os.listdir(_SHARED):
            if name.startswith(prefixes):
                with contextlib.suppress(OSError):  # another user's, or just removed
                    (_SHARED / name).unlink()


def _name(run: str, agent: int) -> str:
    return f"na-{run[-_NUM_CHARACTERS:]}{agent:x}"
