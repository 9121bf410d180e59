"""A free port for a test."""

import itertools
import os
import socket

# Below those that the system gives to connections, and others in each process: another test's could
# be given one of these between the look at it and its use.
_FIRST = 20_000 + os.getpid() % 120 * 100
_ports = itertools.cycle(range(_FIRST, _FIRST + 100))


def free_port() -> int:
    """Return each time another one."""
    for port in itertools.islice(_ports, 50):
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
