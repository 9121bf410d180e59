"""How a rank drops its torch process group, so that no other rank waits for it in a collective.

gloo cannot abort a collective. A waiting rank is freed only when the connection on which it waits
ends: the peer destroys the group, or the rank shuts down its own end by the system call shutdown(2)
(measured: the group's methods ``abort`` and ``shutdown`` do not free it). Any reference to the
group, such as that of a prepared model or a traceback, keeps its sockets open. So the sockets are
shut down first, and the group is destroyed after that.

NCCL and its kin (of_torch.is_asynchronous) can abort, and must: its operations wait on the device
for those of the other ranks, and do not notice a connection that ends. Without an abort, destroying
a group waits for all its queued operations. In an abort the ranks of one machine wait for each
other, since their devices read each other's memory. So a rank that raised may wait in its abort for
other ranks: a stuck rank joins only when it aborts as well, and a rank that has returned joins only
at the next call. Therefore the abort runs in a thread, and the rank waits for the thread for five
seconds at most.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from notebook_accel.private import of_torch
from notebook_accel.rank import this_rank

# For ranks that live on after a failed call. By torch's sources NCCL's watchdog does this once it
# has found an error of a collective, such as a peer that is gone, or its timeout: it tells other
# ranks by the store, sleeps for a minute, and ends the process, whatever has become of the group
# meanwhile. So a session would lose its names a minute after a cell that failed, with a new group
# already at work. 0: it ends nothing, and aborts nothing; what waits is freed by `disconnect`, as a
# wait on gloo's sockets is. (2 would abort by itself, and let the cell go on over garbage.) At the
# signal of another rank a second thread would end the process eight minutes later. And at an error
# of the device the watchdog would end the process before the rank has said what failed.
_OF_LASTING_RANKS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
# How long a rank waits for its abort, in which the others must join. Then it goes on, and the
# thread is still aborting.
_ABORT_SECONDS = 5.0
# What aborts the groups of this process; None before the first time.
_aborting: threading.Thread | None = None


def outlive_failed_collectives() -> None:
    """Have NCCL's watchdog not end this process, unless the person's environment says so."""
    for name, value in _OF_LASTING_RANKS.items():
        os.environ.setdefault(name, value)


def close_group() -> None:
    """Destroy the default process group of this process, if any; errors are ignored.

    Does nothing while a thread still aborts the group (:func:`disconnect`).
    """
    if this_rank.has_process_group() and not (_aborting and _aborting.is_alive()):
        with contextlib.suppress(Exception):  # the call has ended: nothing depends on it
            sys.modules["torch.distributed"].destroy_process_group()


def close_group_within(seconds: float) -> None:
    """Destroy the default process group before the process ends; limit the wait for NCCL.

    Destroying an NCCL group hangs if this rank has queued an operation that another rank has not.

    Args:
        seconds: the longest wait, if the process has an NCCL group; without one there is no limit.
    """
    if not are_asynchronous():
        close_group()
        return
    _start("notebook_accel-close", close_group).join(seconds)


def _start(name: str, act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, name=name, daemon=True)
    thread.start()
    return thread


def are_asynchronous() -> bool:
    """Whether this process has a group whose operations wait for other ranks on the device."""
    # Also of a group that is being made, which is not the default one yet.
    return any(map(of_torch.is_asynchronous, of_torch.backends_of_groups()))


def _abort_groups() -> bool:
    """Abort all process groups of this process if one is of NCCL; wait five seconds at most."""
    global _aborting
    # Groups that torch has aborted are in none of its tables.
    abort = of_torch.abort_groups()
    if abort is None or not are_asynchronous():
        return True
    if _aborting is None or not _aborting.is_alive():
        _aborting = _start("notebook_accel-abort", abort)
    _aborting.join(_ABORT_SECONDS)
    return not _aborting.is_alive()


# The names of the sockets that process groups of this process have opened.
_of_groups: set[str] = set()
# For each group that is being made now: the sockets that there were before.
_before: list[dict[str, int]] = []


@contextlib.contextmanager
def noting_sockets() -> Iterator[None]:
    """Record the sockets that are opened within the block, in which torch makes a process group.

    Gloo connects every pair of ranks while a group is made. So these are the connections on which a
    collective waits, to ranks on this machine or another; :func:`disconnect` shuts them down.
    """
    before = _sockets()
    _before.append(before)
    try:
        yield
    finally:
        _of_groups.update(_sockets().keys() - before.keys())
        _before.remove(before)


def _sockets() -> dict[str, int]:
    """Return this process's sockets: descriptors by the socket's unique name, from /proc."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                found[name] = int(fd)
    return found


def _tcp_sockets() -> Iterator[tuple[str, socket.socket]]:
    """Yield (name, duplicate) for each TCP socket of this process.

    The name is as in :func:`_sockets`; the duplicate is closed once the caller asks for the next
    pair.

    The sockets are found by this process's descriptors. The system's list of connections
    (``/proc/net/tcp``) leaves some out while others open and close: because of that, a rank once
    kept its connection to the store, and waited on it for ever.
    """
    for name, fd in _sockets().items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
            is_inet = end.family in (socket.AF_INET, socket.AF_INET6)
            if is_inet and end.type == socket.SOCK_STREAM:
                yield name, end


def _is_of_group(name: str) -> bool:
    """Whether the socket of this name was opened while torch made a process group."""
    return name in _of_groups or any(name not in before for before in _before)


def _shut_down(end: socket.socket) -> None:
    # One that listens has no peer, and stays.
    with contextlib.suppress(OSError):
        if end.getpeername():
            end.shutdown(socket.SHUT_RDWR)


def disconnect() -> None:
    """Shut down this rank's connections to other ranks and to their store; abort NCCL groups.

    Any thread that waits on such a connection, in this process or at the other end, gets an error
    and so leaves its collective. The user's own connections to other programs stay. If an NCCL
    abort takes longer than five seconds, the connections to the store stay too.

    To tell which sockets are connections of torch, this duplicates each descriptor. If the process
    may open no more descriptors, the connections stay open, and the agent has to interrupt the
    ranks that wait for this rank.
    """
    reserved, port = this_rank.current().store_port, os.environ.get("MASTER_PORT", "")
    # The user's code may have made anything of the variable.
    store_ports = {int(port) if port.isdecimal() else 0, reserved.port if reserved else 0}
    with contextlib.suppress(OSError):
        # A group that connects its ranks at their first collective has only listened until then.
        # Of each connection one end has been accepted.
        listening = {
            end.getsockname()[1]
            for name, end in _tcp_sockets()
            if _is_of_group(name) and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        }
        for name, end in _tcp_sockets():
            own_port = end.getsockname()[1]
            if own_port not in store_ports and (_is_of_group(name) or own_port in listening):
                _shut_down(end)
    if not _abort_groups():
        # The abort still waits for other ranks, over connections that NCCL opened after the group
        # was made: those stay open.
        return
    with contextlib.suppress(OSError):
        for _, end in _tcp_sockets():
            with contextlib.suppress(OSError):
                # Where this rank serves the store, others may have come for the next group already.
                is_served = end.getsockname()[1] in store_ports
                if not is_served and end.getpeername()[1] in store_ports:
                    _shut_down(end)


def act_when_readable(fd: int, act: Callable[[], None]) -> None:
    """Start a daemon thread that calls ``act`` each time the agent writes to the eventfd ``fd``.

    The rank's main thread may be stuck in a collective, which releases the GIL.
    """

    def follow() -> None:
        while os.eventfd_read(fd):
            act()

    _start("notebook_accel-agent", follow)
