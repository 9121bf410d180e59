"""The ports of a run: bound by the agent before its ranks begin, and handed to rank 0.

    MASTER_PORT    in the environment of every rank, for stores that the user's code opens
    store port     of the store for the run's own process groups, if all ranks are on one machine

Rank 0 serves both stores, so only the agent of rank 0 reserves ports. The other agents learn
MASTER_PORT with each call.
"""

from __future__ import annotations

import socket

from notebook_accel import wire
from notebook_accel.private import of_torch

_LOOPBACK = "127.0.0.1"


class RunPorts:
    """The sockets that an agent has bound for the stores of its run's rank 0.

    Attributes:
        master: socket bound to MASTER_PORT; None if another agent has rank 0, or after
            :meth:`close`.
        store: socket bound to the store port; None if the ranks are on several machines, or after
            :meth:`close`.
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
        """The port that this agent has reserved as MASTER_PORT; 0 if it has reserved none."""
        return 0 if self.master is None else int(self.master.getsockname()[1])

    def renew_master(self) -> None:
        """Reserve another MASTER_PORT, if this agent has reserved one.

        Called before a call for which the ranks drop their process group: rank 0 may still listen
        on the old port for the store of the old group.
        """
        if self.master is not None:
            # The old one is let go of afterwards, so that the new one is sure to be another.
            old = self.master
            self.master = _reserve(0, host=self._host, shared=not self._has_peers)
            old.close()
            self._is_new = True

    def master_for_rank_0(self) -> socket.socket | None:
        """Return the socket bound to MASTER_PORT, to be sent to rank 0; once per reserved port.

        None if it was returned before, if this agent has no such socket, or if rank 0 is to bind
        the port itself (a single rank, or torch's own stores).
        """
        if self.master is None or not (self._is_new and self._has_peers):
            return None
        self._is_new = False
        return self.master

    def close(self) -> None:
        """Close the sockets, so that the next launch can bind the same ports."""
        for bound in (self.master, self.store):
            if bound is not None:
                bound.close()
        self.master = self.store = None


def _reserve(port: int, *, host: str = _LOOPBACK, shared: bool = False) -> socket.socket:
    """Return a socket bound to a port of this machine, for a store of rank 0 to listen on.

    Rank 0 gets this very socket. If the port were only agreed on and rank 0 bound it later, with
    SO_REUSEADDR, another user could bind it too, listen first, and get the other ranks'
    connections.
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
