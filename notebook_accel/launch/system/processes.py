"""What we ask of the system: deaths that are noticed, descendants, descriptors to read, C's own
output buffer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Protocol

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

__all__ = [
    "acting_on_exit",
    "adopt_orphans",
    "await_exit",
    "describe_exit",
    "die_with_parent",
    "has_children",
    "import_path",
    "is_readable",
    "kill_descendants",
    "kill_leftovers",
    "kill_tree",
    "line_buffer_c_output",
    "lives",
    "reset_signals",
    "signal_name",
    "supported",
    "watch_exit",
]


def import_path() -> list[str]:
    """``sys.path`` as Python reads it: it passes over what is no text, such as a ``Path``."""
    return [entry for entry in sys.path if isinstance(entry, str)]


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def is_readable(
    source: int | _HasDescriptor, seconds: float | None = 0.0, *, or_writable: bool = False
) -> bool:
    """Whether there is something to read, or an end to see, before the time is over.

    By poll(2), which works where no file can be opened any more: an epoll needs a descriptor.

    Args:
        source: a descriptor, or what has one.
        seconds: how long is waited; None for no limit.
        or_writable: whether room to write counts too.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN | (select.POLLOUT if or_writable else 0))
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


# Of <sys/prctl.h> and <stdio.h>, which Python has no names for.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IOLBF = 1
# How late a process without a second thread notices that another one ended.
_LOOK_SECONDS = 0.1
# What forks as fast as it is killed is left alone after so many looks.
_MAX_ROUNDS = 10


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def die_with_parent(parent: int) -> None:
    """SIGKILL this process when the thread that forked it ends, also if that was before now."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def watch_exit(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends; the caller closes it."""
    return os.pidfd_open(pid)


def await_exit(pid: int, seconds: float) -> None:
    """Wait until the process has ended, or the time is over."""
    with contextlib.suppress(OSError):  # it was reaped, or no descriptor is left to watch it by
        exit_fd = watch_exit(pid)
        try:
            is_readable(exit_fd, seconds)
        finally:
            os.close(exit_fd)


@contextlib.contextmanager
def acting_on_exit(exit_fd: int, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` within the block once ``exit_fd`` is readable; SIGALRM polls it.

    For a main thread that imports or waits for something else, and may have no second thread.
    """

    def look(*_: object) -> None:
        if is_readable(exit_fd):
            act()

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def signal_name(number: int) -> str:
    """ "SIGKILL" for 9; real-time signals by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(exitcode: int | None, number: int | None = None) -> str:
    """How a process ended, as the rest of a sentence: ``was killed by SIGKILL``.

    Args:
        exitcode: of the process; negative for a signal, as Python has it.
        number: of the signal that killed it, for those who keep the two apart.
    """
    if number is None and exitcode is not None and exitcode < 0:
        number = -exitcode
    if number is not None:
        return f"was killed by {signal_name(number)}"
    return f"ended with exit code {exitcode}"


def reset_signals() -> None:
    """Set signal handlers and the signal mask to Python's defaults."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def line_buffer_c_output() -> None:
    """Have C's stdout write each line at once: what it holds is lost when a signal kills it."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(ValueError):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)


def has_children() -> bool:
    """Whether this process has any child, dead ones that it did not wait for included.

    The system knows at once; psutil reads all of /proc for it, 2 ms where there are 130 processes.
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
    """SIGKILL the children of this process outside ``keep``, with all below them.

    A child that changed its user (sudo) cannot be killed, and is left alone.

    Returns:
        Who was reaped.
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
    """Return (descendant, its parent's pid) pairs; not those in or below ``outside``.

    One look at all processes of the machine: a look for each child took 4 s for 300 of them.
    """
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
    """SIGKILL each process of this session, or with this variable in its environment.

    For a run whose agent and template are both dead: nobody is left who adopted its orphans.

    Returns:
        Who was killed.
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
    """Whether the process is there, and is no dead one for which nobody has waited yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill_all(processes: Iterable[psutil.Process]) -> list[int]:
    """SIGKILL them; gives those that belong to another user, and cannot be killed."""
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
    """Whether this platform can end ranks whatever they do."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # an old system, or a container that refuses it
        return False
    return True
