"""The ports of a run: bound by the agent before its ranks begin, and handed to rank 0."""

from __future__ import annotations

import socket

__all__ = ["reserve_port"]


def reserve_port(port: int, *, shared: bool = False) -> socket.socket:
    """A socket bound to a port on the loopback interface, for a store of rank 0 to listen on.

    Rank 0 gets this very socket. Had it to bind one of its own, with SO_REUSEADDR on both, any
    other user could bind the port as well, listen first, and get the connections of the others.

    Args:
        port: which; 0 for any that is free.
        shared: whether others may bind the port as well.
    """
    holder = socket.socket()
    if port or shared:
        # Connections of the run before may linger on a port that the user chose, and only
        # SO_REUSEADDR gets past them.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", port))
    if port and not shared:
        # Of sockets with SO_REUSEADDR only one that listens keeps the others out.
        holder.listen(socket.SOMAXCONN)
    return holder
