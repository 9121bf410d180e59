"""The process group of a training: made once a rank, reachable from this machine only.

Torch's own ``env://`` store listens on all interfaces without a secret, whatever MASTER_ADDR
says. Where all ranks are on one machine, rank 0 serves a store on the loopback interface instead,
and gloo and NCCL are told to use that interface:

    rank 0:  server, one as long as the process lives, on the socket that the launch reserved
                 ^
    each rank, for each group:  a client of its own, whose keys have the group's prefix

A group that is destroyed and made again finds the same server, and none of the first one's keys;
with a server a group, a rank that is early would connect to the old one, which is about to close.
A group that the user made is used as it is.

TORCH_GLOO_LAZY_INIT is left alone. It moves the connections of the full mesh from here to the
first collective: from here to its end 48 ranks took 0.8 s without and 1.0 s with it, 128 ranks 8.9
and 7.0 s (2 busy cores; 6 s of them the exchange of addresses, one by one, through the store). And
a rank whose peer died before the two first met may wait for ever (pytorch/gloo#520).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_accel.errors import ConfigError
from notebook_accel.launch.rank import current, has_process_group

if TYPE_CHECKING:
    from notebook_accel.training.settings import InitProcessGroupKwargs

__all__ = ["close_process_group", "open_process_group"]

_OURS = "process group is ours"
_SERVERS = "stores that this rank serves"
_NUM_GROUPS = "number of groups made in each call"
_STORE_TIMEOUT = timedelta(minutes=5)
_PROBE_SECONDS = 1.0
_POLL_SECONDS = 0.001
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK_NAMES = ("lo", "lo0")


def open_process_group(
    *,
    rank: int,
    world_size: int,
    local_world_size: int,
    backend: str,
    options: InitProcessGroupKwargs,
) -> None:
    """Make the default group of this rank, and wait until all ranks are there.

    Raises:
        ConfigError: the environment does not say where the ranks meet.
    """
    arguments: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if options.timeout is not None:
        arguments["timeout"] = options.timeout
    if options.init_method is not None:
        arguments["init_method"] = options.init_method
    elif local_world_size == world_size and (current().store or _meets_here()):
        _use_loopback_interface()
        arguments["store"] = _store_of_next_group(rank, options.timeout or _STORE_TIMEOUT)
    else:
        arguments["init_method"] = "env://"
    dist.init_process_group(backend, **arguments)
    current().shared[_OURS] = True


def close_process_group() -> None:
    """Leave the default group, if it was made here; nothing happens otherwise."""
    if current().shared.pop(_OURS, False) and has_process_group():
        dist.destroy_process_group()


def _meets_here() -> bool:
    """Whether the ranks meet on this machine at a store that nobody else holds."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    return _is_loopback(_needed("MASTER_ADDR"))


def _needed(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')} but {variable} is not set, so the "
            "ranks do not know where to meet. Start them by notebook_launcher or torchrun, or "
            "set it"
        )
    return value


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _use_loopback_interface() -> None:
    """Keep what gloo and NCCL listen on off the network, unless the user named an interface."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    loopback = next((name for name in _LOOPBACK_NAMES if name in names), None)
    for variable in _INTERFACE_VARIABLES if loopback else ():
        os.environ.setdefault(variable, str(loopback))


def _store_of_next_group(rank: int, timeout: timedelta) -> Any:
    """A store with nothing in it, the same for all ranks.

    Ranks count their groups call by call: one that failed in the call before, without having made
    the group that the others made, still agrees with them in this one.
    """
    address, port = _serve(timeout) if rank == 0 else _address()
    if rank != 0:
        _await_listener(address, port, timeout)
    client = dist.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    counts = current().shared.setdefault(_NUM_GROUPS, {})
    counts[current().call] = number = counts.get(current().call, 0) + 1
    return dist.PrefixStore(f"call {current().call}, group {number}", client)  # type: ignore[attr-defined]


def _address() -> tuple[str, int]:
    """Where rank 0 serves the store."""
    reserved = current().store
    if reserved is not None:
        return reserved.host, reserved.port
    host = _needed("MASTER_ADDR")
    return "127.0.0.1" if host == "localhost" else host, int(_needed("MASTER_PORT"))


def _serve(timeout: timedelta) -> tuple[str, int]:
    """Serve the store, unless this rank does already; gives its address."""
    address, port = _address()
    servers = current().shared.setdefault(_SERVERS, {})
    if (address, port) not in servers:
        reserved = current().store
        bound = reserved.listener if reserved else None
        servers[address, port] = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            # The store closes the socket with itself; that of the launch is not its own.
            master_listen_fd=os.dup(bound.fileno()) if bound else _listen(address, port).detach(),
        )
    return address, port


def _await_listener(address: str, port: int, timeout: timedelta) -> None:
    """Wait until rank 0 listens: a store that finds nobody there sleeps half a second and more."""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=_PROBE_SECONDS).close()
        except OSError:
            time.sleep(_POLL_SECONDS)
        else:
            return


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier run may linger on a port that is used again.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"MASTER_PORT={port} cannot be listened on at {address} ({error.strerror}): "
            "another program has it; set a free one"
        ) from error
    return listener
