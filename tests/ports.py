"""A free port for a test."""

from __future__ import annotations

import random
import socket

# Below those that the system gives to connections: another test's could be given one of these
# between the look at it and its use.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    for port in random.sample(_PORTS, 50):
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("fifty ports that were tried are taken")
