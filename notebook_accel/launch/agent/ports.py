"""The ports of a run: bound by the agent before its ranks begin, and handed to rank 0.

    MASTER_PORT    in the environment of every rank, for stores that the user's code opens
    store port     where the process groups of a run meet whose ranks are all on one machine

Ranks meet where rank 0 is: the other agents reserve nothing, and learn MASTER_PORT with each call.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from notebook_accel.private import of_torch

if TYPE_CHECKING:
    from notebook_accel.launch import wire

__all__ = ["RunPorts"]

_LOOPBACK = "127.0.0.1"


class RunPorts:
    """The sockets that an agent has bound for its run.

    Attributes:
        master: bound to MASTER_PORT; None where rank 0 is behind another agent, or after the end.
        store: bound to the store port; None where ranks are on several machines, or after the end.
    """

    def __init__(self, launch: wire.Launch) -> None:
        self.master: socket.socket | None = None
        self.store: socket.socket | None = None
        # A rank alone has nobody to meet, and leaves MASTER_PORT to its children; and stores that
        # are torch's own bind it themselves.
        self._has_peers = launch.world_size > 1 and of_torch.is_to_replace(launch.environment)
        self._is_new = True
        is_alone = len(launch.ranks) == launch.world_size
        # Other machines have to reach it, by whatever name MASTER_ADDR has for it.
        self._host = _LOOPBACK if is_alone else launch.environment.get("MASTER_ADDR", _LOOPBACK)
        if any(spec.rank == 0 for spec in launch.ranks):
            port = int(launch.environment.get("MASTER_PORT", "0"))
            self.master = _reserve(port, host=self._host, shared=not self._has_peers)
        if is_alone:
            self.store = _reserve(0)

    @property
    def master_number(self) -> int:
        """MASTER_PORT; 0 if this agent has reserved no port for it."""
        return 0 if self.master is None else int(self.master.getsockname()[1])

    def renew_master(self) -> None:
        """Reserve another MASTER_PORT: on the old one a rank may still listen for its old group."""
        if self.master is not None:
            # The old one is let go of afterwards, so that the new one is sure to be another.
            old = self.master
            self.master = _reserve(0, host=self._host, shared=not self._has_peers)
            old.close()
            self._is_new = True

    def master_for_rank_0(self) -> socket.socket | None:
        """Return the MASTER_PORT socket if rank 0 still has to get it, once; else None."""
        if self.master is None or not (self._is_new and self._has_peers):
            return None
        self._is_new = False
        return self.master

    def close(self) -> None:
        """Close the sockets: the next launch may want the same ports."""
        for bound in (self.master, self.store):
            if bound is not None:
                bound.close()
        self.master = self.store = None


def _reserve(port: int, *, host: str = _LOOPBACK, shared: bool = False) -> socket.socket:
    """Return a socket bound to a port of this machine, for a store of rank 0 to listen on.

    Rank 0 inherits the socket. If it bound a socket itself, with SO_REUSEADDR on both, another user
    could bind the same port, listen first, and get the connections of the other ranks.

    Args:
        port: which; 0 for any that is free.
        host: the address; that of the loopback interface where no other machine needs it.
        shared: whether others may bind the port as well.
    """
    holder = socket.socket()
    if port or shared:
        # Connections of the run before may linger on a port that the user chose, and only
        # SO_REUSEADDR gets past them.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, port))
    if port and not shared:
        # Of sockets with SO_REUSEADDR only one that listens keeps the others out.
        holder.listen(socket.SOMAXCONN)
    return holder
