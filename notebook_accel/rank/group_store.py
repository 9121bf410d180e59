"""The store (a ``TCPStore``) at which ranks exchange addresses when they make a process group.

    rank 0:  one server, for the life of the process, on the socket that the launch reserved
                 ^
    each rank, for each process group:  its own client, whose keys have the prefix of that group

A process group that is destroyed and made again uses the same server with another prefix, and so
sees no key of the earlier group. Torch alone would make a new server for each group. A rank that
connects early would then reach the old server, which is about to close: its connection would be
reset, or the rank would wait for ever.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

from notebook_accel.errors import ConfigError
from notebook_accel.rank.this_rank import StorePort, current

_SERVER = "the address of the store that this rank serves, and the store"
_NUM_GROUPS = "number of groups made in each call"
# A connection to the loopback interface is made or refused at once; a busy server may be late.
_PROBE_SECONDS = 1.0
# Ranks begin within milliseconds of each other, and all wait for rank 0's store.
_POLL_SECONDS = 0.001


def store_of_next_group(rank: int, timeout: timedelta, at: StorePort) -> Any:
    """Return an empty store for the next process group; all ranks share the store.

    All ranks must call it once for each process group that they make. The prefix of the store's
    keys has the number of the group. The number starts at 1 again in each call of the user's
    function: a rank that failed to make a group in one call has the right prefix in the next call.

    Args:
        at: the address of the store; if ``at.listener`` is None, rank 0 opens a socket there.
    """
    from torch import distributed

    if rank == 0:
        _serve(timeout, at)
    # To open torch's store before rank 0 listens would be slower: after a refused connection it
    # sleeps for half a second. Where rank 0 never listens, the store raises the error.
    deadline = time.monotonic() + timeout.total_seconds()
    while rank != 0 and time.monotonic() < deadline:
        try:
            socket.create_connection((at.host, at.port), timeout=_PROBE_SECONDS).close()
        except OSError:
            time.sleep(_POLL_SECONDS)
        else:
            break
    client = distributed.TCPStore(at.host, at.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    counts = current().shared.setdefault(_NUM_GROUPS, {})
    counts[current().call] = number = counts.get(current().call, 0) + 1
    return distributed.PrefixStore(f"call {current().call}, group {number}", client)  # type: ignore[attr-defined]


def is_served(port: int) -> bool:
    """Return whether this process serves the store at ``port``; False on all ranks but rank 0."""
    address, _ = current().shared.get(_SERVER, (None, None))
    return address is not None and bool(address[1] == port)


def _serve(timeout: timedelta, at: StorePort) -> None:
    from torch import distributed

    address, _ = current().shared.get(_SERVER, (None, None))
    if address == (at.host, at.port):
        return
    # A store closes its socket when it ends, and the launch's must stay open: a duplicate is given.
    listener = os.dup(at.listener.fileno()) if at.listener else _listen(at.host, at.port).detach()
    server = distributed.TCPStore(  # type: ignore[attr-defined]
        at.host,
        at.port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        # A store that the function opens at this port shares the server.
        multi_tenant=True,
        master_listen_fd=listener,
    )
    current().shared[_SERVER] = ((at.host, at.port), server)


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # With SO_REUSEADDR: connections of an earlier run may linger on a port that is used again.
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    except OSError as error:  # whose text has the address
        raise ConfigError(
            f"MASTER_PORT={port} cannot be listened on ({error.strerror}): "
            "another program has it; set a free one"
        ) from error
