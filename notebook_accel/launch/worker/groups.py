"""How a rank drops its process group, so that no other rank waits for it any more.

gloo has no abort. A rank that waits in a collective is freed when the connection on which it
waits ends: because the peer destroyed the group, or because it shuts its own end down (measured:
neither ``abort`` nor ``shutdown`` of the group did it, shutdown(2) did). Who still refers to the
group, a prepared model or a traceback, keeps its sockets open; so these are shut down first.

NCCL has an abort, and needs it: its operations wait on the device for those of the other ranks,
where no connection that ends is seen, and destroying a group waits for all that is queued in it.
In an abort the ranks of one machine wait for each other, since their devices read each other's
memory. A rank that raised would wait until stuck ranks are told to abort as well, and for one that
returned until the next call. So a thread aborts, and is waited for a while.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

from notebook_accel.launch import rank
from notebook_accel.private import of_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "act_when_readable",
    "close_group",
    "close_group_within",
    "disconnect",
    "noting_sockets",
]

# How long a rank waits for its abort, in which the others must join. Then it goes on, and the
# thread is still aborting.
_ABORT_SECONDS = 5.0
# What aborts the groups of this process; None before the first time.
_aborting: threading.Thread | None = None


def close_group() -> None:
    """Destroy the default process group of this process, unless it is being aborted."""
    if rank.has_process_group() and not (_aborting and _aborting.is_alive()):
        with contextlib.suppress(Exception):  # the call has ended: nothing depends on it
            sys.modules["torch.distributed"].destroy_process_group()


def close_group_within(seconds: float) -> None:
    """Destroy the process group at the end of the process; give a group of NCCL a time limit.

    Destroying a group of NCCL never ends if this rank has queued an operation that another rank has
    not. Groups of other backends have no limit.
    """
    if not _waits_on_device():
        close_group()
        return
    _start("notebook_accel-close", close_group).join(seconds)


def _start(name: str, act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, name=name, daemon=True)
    thread.start()
    return thread


def _waits_on_device() -> bool:
    """Whether this process has a process group of NCCL."""
    if not rank.has_process_group():
        return False
    return any("nccl" in backends for backends in of_torch.backends_of_groups())


def _abort_groups() -> bool:
    """Abort this process's process groups if their operations wait on a device (NCCL).

    Returns:
        False if the abort still waits for another rank to abort as well; else True.
    """
    global _aborting
    # Groups that torch has aborted are in none of its tables.
    abort = of_torch.abort_groups()
    if abort is None or not _waits_on_device():
        return True
    if _aborting is None or not _aborting.is_alive():
        _aborting = _start("notebook_accel-abort", abort)
    _aborting.join(_ABORT_SECONDS)
    return not _aborting.is_alive()


# One entry for each process group that this process has made, or is making: the names of the
# sockets that there were before, and of those that it opened (None while it is being made).
_made: list[tuple[set[str], set[str] | None]] = []


@contextlib.contextmanager
def noting_sockets() -> Iterator[None]:
    """Record the sockets that are opened within the block, which makes a process group.

    Gloo connects every pair of ranks while a group is made; wherever the other rank is, behind
    another agent or on another machine, these are the connections on which a collective waits.
    """
    before = _sockets()
    _made.append((set(before), None))
    index = len(_made) - 1
    try:
        yield
    finally:
        _made[index] = set(), set(_sockets()) - set(before)


def _sockets() -> dict[str, int]:
    """Return this process's socket descriptors by the socket's name in /proc."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                found[name] = int(fd)
    return found


def _tcp_sockets() -> Iterator[tuple[str, socket.socket]]:
    """Yield (name, duplicate) of each TCP socket of this process, and close the duplicate.

    Found by their descriptors, not by the system's list of connections (``/proc/net/tcp``), which
    leaves some out while others come and go: a rank that kept its connection to the store waited
    there for ever.
    """
    for name, fd in _sockets().items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
            is_inet = end.family in (socket.AF_INET, socket.AF_INET6)
            if is_inet and end.type == socket.SOCK_STREAM:
                yield name, end


def _disconnect_groups(store_ports: set[int]) -> None:
    """Shut down the connections that this process's groups made or accepted."""
    # A group that connects its ranks at their first collective has only listened until then. Of
    # each connection one end has been accepted.
    listening = {
        end.getsockname()[1]
        for name, end in _tcp_sockets()
        if _is_of_group(name) and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }
    for name, end in _tcp_sockets():
        own_port = end.getsockname()[1]
        if own_port not in store_ports and (_is_of_group(name) or own_port in listening):
            _shut_down(end)


def _is_of_group(name: str) -> bool:
    """Whether a socket was opened while a process group was made, or is being made now."""
    return any(
        name in (opened or ()) or (opened is None and name not in before)
        for before, opened in _made
    )


def _shut_down(end: socket.socket) -> None:
    # One that listens has no peer, and stays.
    with contextlib.suppress(OSError):
        if end.getpeername():
            end.shutdown(socket.SHUT_RDWR)


def disconnect() -> None:
    """Shut this rank's connections to the other ranks, and to their store, down.

    Whoever waits on one of them gets an error, in this process and in the others. Connections
    of the user's own to other programs stay. Groups of NCCL are aborted. Where the user's code has
    left no descriptor to look at the connections by, all stay: the rank lives on, and whoever waits
    for it is interrupted.
    """
    reserved, port = rank.current().store_port, os.environ.get("MASTER_PORT", "")
    # The user's code may have made anything of the variable.
    store_ports = {int(port) if port.isdecimal() else 0, reserved.port if reserved else 0}
    with contextlib.suppress(OSError):
        _disconnect_groups(store_ports)
    if not _abort_groups():
        # The abort still waits for other ranks, over connections that NCCL opened after the group
        # was made: those stay open.
        return
    with contextlib.suppress(OSError):
        _disconnect_store(store_ports)


def _disconnect_store(store_ports: set[int]) -> None:
    """Shut down this process's connections to a store at these ports, unless it serves them."""
    for _, end in _tcp_sockets():
        with contextlib.suppress(OSError):
            # Where this rank serves the store, others may have come for the next group already.
            is_served = end.getsockname()[1] in store_ports
            if not is_served and end.getpeername()[1] in store_ports:
                _shut_down(end)


def act_when_readable(fd: int, act: Callable[[], None]) -> None:
    """Start a thread that calls ``act`` when the agent writes to ``fd``.

    The main thread cannot: it is in the collective, which lets go of the GIL meanwhile.

    Args:
        fd: an eventfd.
        act: called each time.
    """

    def follow() -> None:
        while os.eventfd_read(fd):
            act()

    _start("notebook_accel-disconnect", follow)
