"""Helpers for processes: watch, describe and kill them, and remove what they leave behind.

    agent: use_scratch -> its ranks: temporary files -> who sees them end: remove_scratch

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
import ctypes
import fcntl
import os
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

import psutil

from notebook_accel.private import of_libraries
from notebook_accel.system.modules import import_path


def python_code(code: str) -> tuple[str, ...]:
    """Return the command of a Python that runs ``code``, and can import what this process can."""
    path = [entry for entry in import_path() if os.path.isabs(entry)]
    path.append(str(Path(__file__).parents[2]))
    # After the interpreter's own: a file beside the notebook must not shadow a module of Python's.
    head = f"import sys; sys.path[:] = [p for p in sys.path if p] + {path!r}; "
    return sys.executable, "-c", head + code


# What a kernel leaves in its environment that would mislead a rank: the beginnings of names, and
# whole names, of which one is a secret. What torchelastic sets is named exactly: ROLE_ARN or
# GROUP_ID are somebody's own.
_KERNELS_OWN = ("JPY_", "PYDEVD_")
_KERNELS_OWN_NAMES = (
    *("MPLBACKEND", "NOTEBOOK_ACCEL_JOIN_TOKEN", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)


def kept_environment() -> dict[str, str]:
    """Return this process's environment variables, without those that would mislead a rank.

    Left out are variables of the Jupyter kernel, and those that torchrun sets (``RANK``).
    """
    return {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(_KERNELS_OWN) and name not in _KERNELS_OWN_NAMES
    }


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def is_readable(
    source: int | _HasDescriptor, seconds: float = 0.0, *, or_writable: bool = False
) -> bool:
    """Wait until a descriptor can be read or its other end was closed; return False on a time-out.

    It uses poll(2), which works even if no more files can be opened; epoll would open a descriptor.

    Args:
        seconds: how long to wait; 0 does not wait.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN | (select.POLLOUT if or_writable else 0))
    return bool(poll.poll(1000 * seconds))


# Of <sys/prctl.h> and <stdio.h>, which Python has no names for.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IOLBF = 1
# How long a round waits for what it has killed.
_LOOK_SECONDS = 0.1
# What forks as fast as it is killed is left alone after so many looks.
_MAX_ROUNDS = 10


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def die_with_parent(parent: int) -> None:
    """Have the system SIGKILL this process when the thread that forked it ends.

    If the parent process is gone already, this process kills itself at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the new parent of any descendant that loses its parent.

    So all descendants stay below this process, which can find and kill them.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def watch_exit(pid: int) -> int:
    """Return a descriptor that is readable once the process has ended; the caller closes it."""
    return os.pidfd_open(pid)


def await_exit(pid: int, seconds: float) -> None:
    """Wait for the end of the process, ``seconds`` at most; do not wait if it cannot be watched.

    A process cannot be watched if it was reaped already, or if no more files can be opened.
    """
    with contextlib.suppress(OSError):  # it was reaped, or no descriptor is left to watch it by
        exit_fd = watch_exit(pid)
        try:
            is_readable(exit_fd, seconds)
        finally:
            os.close(exit_fd)


def end_on_hangup(pipe: int, pid: int) -> None:
    """Have a process get SIGIO, which ends it, when all writing ends of ``pipe`` are closed.

    This ends a process that does not run our code yet, or is busy with imports.
    """
    with contextlib.suppress(OSError):  # a sandbox without such signals
        fcntl.fcntl(pipe, fcntl.F_SETOWN, pid)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def signal_name(number: int) -> str:
    """Return the name of a signal: "SIGKILL" for 9, or "signal 40" if 40 has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(exitcode: int | None, number: int | None = None) -> str:
    """Return how a process ended, as the rest of a sentence: ``was killed by SIGKILL``.

    Args:
        number: the signal that killed the process, if ``exitcode`` does not have it; else None.
    """
    if number is None and exitcode is not None and exitcode < 0:
        number = -exitcode
    if number is not None:
        return f"was killed by {signal_name(number)}"
    return f"ended with exit code {exitcode}"


def reset_signals() -> None:
    """Set signal handlers and the signal mask to Python's defaults, in a process just forked."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def line_buffer_c_output() -> None:
    """Have C's stdout write each line at once: a killed process loses what is in its buffer."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(ValueError):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)


def has_children() -> bool:
    """Return whether this process has a child; dead children that were not waited for count.

    It makes one system call. psutil would read all of /proc, which takes 2 ms with 130 processes.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def kill_tree(pids: Iterable[int]) -> None:
    """SIGKILL the processes and all their descendants."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            _kill_all([root, *root.children(recursive=True)])


def kill_descendants(*, keep: Collection[int] = ()) -> list[int]:
    """SIGKILL all descendants of this process, except those in ``keep`` and their descendants.

    A process that runs as another user (sudo) cannot be killed, and is left alone.
    """
    me = os.getpid()
    reaped: list[int] = []
    spared = set(keep)
    # Once more after each round: what a child leaves becomes a child of this process when it dies.
    while doomed := _descendants(outside=spared):
        spared.update(_kill_all(process for process, _ in doomed))
        for child in (process.pid for process, parent in doomed if parent == me):
            if child not in spared:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)
                    reaped.append(child)
        if not any(parent == me for _, parent in doomed):
            break
    return reaped


def _descendants(*, outside: Collection[int]) -> list[tuple[psutil.Process, int]]:
    """Return a pair (descendant, its parent's pid) for each process below this one."""
    found: list[tuple[psutil.Process, int]] = []
    if not has_children():
        return found
    spared = set(outside)
    # Parents come before their children.
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = process.ppid()
            if process.pid in spared or parent in spared:
                spared.add(process.pid)
            else:
                found.append((process, parent))
    return found


def kill_leftovers(*, session: int, variable: tuple[str, str]) -> list[int]:
    """SIGKILL the processes of a Unix session, and those with a certain environment variable.

    It is for a run whose agent and template were killed or are stuck: no other process is left that
    could kill the descendants of its ranks.
    """
    killed: list[int] = []
    for _ in range(_MAX_ROUNDS):
        left = [p for p in psutil.process_iter() if _is_leftover(p, session, variable)]
        if not left:
            break
        _kill_all(left)
        psutil.wait_procs(left, timeout=_LOOK_SECONDS)
        killed += [process.pid for process in left]
    return killed


def _is_leftover(process: psutil.Process, session: int, variable: tuple[str, str]) -> bool:
    # No process gets the number of a session while anybody is in it. So where a process of that
    # number lives, the old session is empty, and whoever has its number is in a newer one.
    with contextlib.suppress(psutil.Error, OSError):
        is_of_session = os.getsid(process.pid) == session and not lives(session)
        return lives(process.pid) and (
            is_of_session or process.environ().get(variable[0]) == variable[1]
        )
    return False


def lives(pid: int) -> bool:
    """Return whether the process exists, and is no zombie (a dead process not yet waited for)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill_all(processes: Iterable[psutil.Process]) -> list[int]:
    """SIGKILL the processes; return the pids of those that could not be killed (another user's)."""
    refused = []
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
        except psutil.AccessDenied:
            refused.append(process.pid)
    return refused


def supported() -> bool:
    """Return whether this system can watch and end ranks: Linux 5.3 or newer with pidfd_open."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # an old system, or a container that refuses it
        return False
    return True


# ---- temporary files of an agent and its ranks -----------------------------------------------

# Of a run's name, from its end: digits of the microsecond in which it was made, and a random one.
_NUM_CHARACTERS = 4
_SHARED = Path("/dev/shm")


def use_scratch(run: str) -> None:
    """Give this process, an agent of ``run``, its own scratch folder and prefix for names."""
    agent = os.getpid()
    # Where multiprocessing looks (util.get_temp_dir, SemLock._make_name); children inherit it.
    config = of_libraries.process_settings()
    config["semprefix"] = f"/{_scratch_name(run, agent)}"
    with contextlib.suppress(OSError):
        os.mkdir(scratch_folder(run, agent), 0o700)
        config["tempdir"] = str(scratch_folder(run, agent))


def scratch_folder(run: str, agent: int) -> Path:
    """Return the scratch folder of an agent of ``run``; ``agent`` is the agent's pid."""
    return Path(tempfile.gettempdir()) / _scratch_name(run, agent)


def remove_scratch(run: str, agent: int, *, used_by: Collection[int]) -> None:
    """Remove the temporary files that an agent and its ranks have left behind."""
    shutil.rmtree(scratch_folder(run, agent), ignore_errors=True)
    for path in _SHARED.glob(f"sem.{_scratch_name(run, agent)}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
    # Tensors in shared memory. A process that lives under a pid is a newer one, which has the
    # number now.
    prefixes = tuple(f"torch_{pid}_" for pid in used_by if not lives(pid))
    with contextlib.suppress(OSError):
        for name in os.listdir(_SHARED):
            if name.startswith(prefixes):
                with contextlib.suppress(OSError):  # another user's, or just removed
                    (_SHARED / name).unlink()


def _scratch_name(run: str, agent: int) -> str:
    return f"na-{run[-_NUM_CHARACTERS:]}{agent:x}"
