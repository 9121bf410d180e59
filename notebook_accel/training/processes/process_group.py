"""Make and destroy torch's default process group, on the loopback interface if possible.

Torch's own ``env://`` store listens on all interfaces without a secret, whatever MASTER_ADDR
says. If all ranks are on one machine, they use the store of ``rank.group_store`` on the loopback
interface instead, and gloo and NCCL are told to use that interface. A process group that the user
made is used as it is.

TORCH_GLOO_LAZY_INIT is not set. It would move the connections of all pairs of ranks from
``init_process_group`` to the first collective, which gains little. The time from
``init_process_group`` to the end of the first collective, without and with the variable, was 0.06
and 0.08 s for 2 ranks, 0.4 and 0.5 s for 8, 0.8 and 1.0 s for 48, 8.9 and 7.0 s for 128 (on 2 busy
cores; the 128 ranks need 6 s to exchange addresses, one by one, through the store). With the
variable a rank may also wait for ever for a peer that died before the two had connected
(pytorch/gloo#520).

Nor is ``device_id`` given, so that NCCL connects at a group's first collective. With it, by torch's
sources, all ranks would connect as the group is made, also in a session whose cell has no
collective, after each cell that failed; and sends and receives of a pipeline would share the
communicator of the collectives, and run one after the other.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

# Its functions have the default group of the moment of this import as a default argument. The first
# optimizer imports it by torch._dynamo: after the group was made, that would keep the group, and
# gloo's threads, for good.
import torch.distributed.nn  # noqa: F401
from torch.distributed.constants import default_pg_timeout

from notebook_accel.config.checks import too_old_torch
from notebook_accel.errors import ConfigError
from notebook_accel.rank.group_store import store_of_next_group
from notebook_accel.rank.this_rank import RankContext, StorePort, current, has_process_group
from notebook_accel.training.settings.handlers import InitProcessGroupKwargs

_OURS = "process group is ours"
# For the connections alone. The store also has what ranks wait for later: NCCL connects them at the
# first collective, to which a rank may come after all others.
_STORE_TIMEOUT = timedelta(minutes=5)
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_IDLE_SECONDS = 0.01
_SECONDS_UNTIL_IDLE = 5.0
_FELL_ASLEEP = "voluntary_ctxt_switches"


def open_process_group(
    *, context: RankContext, backend: str, options: InitProcessGroupKwargs
) -> None:
    """Make torch's default process group; all ranks call it, and it waits until all have joined."""
    arguments: dict[str, Any] = {"rank": context.rank, "world_size": context.world_size}
    if options.timeout is not None:
        arguments["timeout"] = options.timeout
    if options.init_method is not None:
        arguments["init_method"] = options.init_method
    elif context.local_world_size == context.world_size and (current().store_port or _meets_here()):
        for variable in _INTERFACE_VARIABLES:
            os.environ.setdefault(variable, "lo")
        timeout = options.timeout or _STORE_TIMEOUT
        arguments["store"] = store_of_next_group(context.rank, timeout, _address())
    else:
        arguments["init_method"] = "env://"
    dist.init_process_group(backend, **arguments)
    if "store" in arguments:
        arguments["store"].set_timeout(options.timeout or default_pg_timeout)
    current().shared[_OURS] = True
    if not current().launched:
        atexit.register(_close_at_exit, os.getpid())


def close_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Destroy ``group``; if it is None, torch's default group, provided that this package made it.

    It first waits until gloo's threads are idle. The reason: a prepared model may keep the group
    alive. The thread that frees this model joins gloo's threads while it holds Python's global lock
    (GIL), and would hang if a gloo thread still waited for the lock.
    """
    _wait_until_gloo_is_idle()
    if group is not None:
        dist.destroy_process_group(group)
    elif current().shared.pop(_OURS, False) and has_process_group():
        dist.destroy_process_group()


def _close_at_exit(pid: int) -> None:
    """Destroy the default process group when a script ends (an ``atexit`` function).

    Without this, torch warns that nobody did so (NCCL and its kin, or several backends), and a gloo
    thread that still holds a tensor aborts the process as Python ends
    ("terminate called without an active exception", https://github.com/pytorch/pytorch/pull/179291).
    Destroying the group ends these threads. If a prepared model keeps the group alive, the threads
    go on, so the function also waits until they are idle.

    After an error the group is not destroyed: that would wait for collectives which other ranks may
    never join.
    """
    if os.getpid() != pid:
        return
    if not hasattr(sys, "last_value"):
        close_process_group()
    _wait_until_gloo_is_idle()


def _wait_until_gloo_is_idle() -> None:
    """Wait, 5 s at most, until no gloo thread has run for a while, so that none holds a tensor."""
    if too_old_torch((2, 11)):  # they have no names of their own there
        time.sleep(0.1)
    deadline = time.monotonic() + _SECONDS_UNTIL_IDLE
    before: list[dict[str, str]] = []
    while (now := _gloo_threads()) and time.monotonic() < deadline:
        if now == before and all(thread["State"] == "S (sleeping)" for thread in now):
            return
        before = now
        time.sleep(_IDLE_SECONDS)


def _gloo_threads() -> list[dict[str, str]]:
    """Return each gloo thread's state and how often it slept, from Linux's /proc."""
    threads = []
    for status in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # it may have ended
            fields = dict(line.partition(":\t")[::2] for line in status.read_text().splitlines())
            if fields.get("Name") == "pt_gloo_runloop":
                # Sandboxes leave some fields out.
                threads.append({name: fields.get(name, "") for name in ("State", _FELL_ASLEEP)})
    return threads


def _meets_here() -> bool:
    """Return whether MASTER_ADDR is loopback and no agent of torchrun serves a store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    host = _needed("MASTER_ADDR")
    with contextlib.suppress(ValueError):  # of a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _needed(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')} but {variable} is not set, so the "
            "ranks do not know where to meet. Start them by notebook_launcher or torchrun, or "
            "set it"
        )
    return value


def _address() -> StorePort:
    """Return the address at which rank 0 serves the store: the launcher's or MASTER_ADDR's."""
    reserved = current().store_port
    if reserved is not None:
        return reserved
    host = _needed("MASTER_ADDR")
    port = int(_needed("MASTER_PORT"))
    return StorePort("127.0.0.1" if host == "localhost" else host, port, listener=None)
