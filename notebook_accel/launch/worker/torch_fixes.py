"""All patches of torch in a rank's process; ``private/of_torch.py`` knows torch's private names.

``NOTEBOOK_ACCEL_TORCH_FIXES=0`` in the environment of a launch leaves torch unpatched. If the
installed torch lacks a function to be patched, or has it with other parameters, that patch is left
out, and a line on rank 0 says so.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from notebook_accel.private import of_torch
from notebook_accel.rank import group_store
from notebook_accel.rank.this_rank import StorePort, current


def avoid_hang_when_model_outlives_group() -> None:
    """Patch torch so that a CPU rank may drop its model after it has destroyed its process group.

    Unpatched, this can hang. A backward pass leaves a Python object with each of gloo's reductions,
    and gloo's threads need the GIL to release the object. Dropping the last reference to the group
    joins those threads while holding the GIL. The model often has that last reference
    (pytorch/pytorch#56297 is the general case). The object only serves a backward pass on
    accelerators, so the patch leaves it out on the CPU.
    """
    import torch  # noqa: F401 - imported as late as can be

    def wrap(stash: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
        def unless_context(key: str, arg: Any) -> None:
            # The key of the object that torch stashes for each thread of a backward.
            if key != "context":
                stash(key, arg)

        return unless_context

    if os.environ.get("ACCELERATE_USE_CPU") == "true":
        of_torch.replace_stash(wrap)


def watch_new_groups(making: Callable[[], AbstractContextManager[None]]) -> None:
    """Patch torch so that each process group is made inside ``with making():``.

    ``making()`` lets the caller record the group's sockets, which is possible only while the group
    is made. A gloo group is returned only once all its ranks have made it. Without this wait, a
    rank could destroy its group right after making it. That closes connections which other ranks
    still wait for, and their ``init_process_group`` fails ("Connection closed by peer").
    """

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def helper(*args: Any, **kwargs: Any) -> Any:
            with making():
                group, store = plain(*args, **kwargs)
                if _has_gloo(group):
                    _wait_until_all_have(group, store)
            return group, store

        return helper

    of_torch.replace_group_maker(wrap)


def _has_gloo(group: Any) -> bool:
    """Return whether this rank is in ``group`` and gloo is a backend of it."""
    from torch import distributed

    try:
        return "gloo" in distributed.get_backend_config(group)
    except (AttributeError, ValueError):  # of another group
        return False


def _wait_until_all_have(group: Any, store: Any) -> None:
    """Wait until every rank of ``group`` has made the group; all its ranks must call this.

    A rank that fails to make the group never calls this. If its error ends its call, the agent ends
    this wait about a second later (agent/ending.py). If the user's function catches the error, the
    wait lasts until the store's timeout: the failed rank cannot report sooner, since torch gave it
    no store of this group, and its other store may be what failed.
    """
    # A store may have served a group of the same name before.
    generation, num_before = divmod(store.add("made", 1) - 1, group.size())
    all_have = f"made by all, {generation}"
    if num_before + 1 == group.size():
        store.set(all_have, "")
    else:
        store.wait([all_have])


# The first parameters of TCPStore, in order; and how many come before ``multi_tenant`` and before
# ``master_listen_fd``, the descriptor that it listens on. Callers may pass them by position.
_STORE_PARAMETERS = ("host_name", "port", "world_size", "is_master")
_NUM_BEFORE_MULTI_TENANT = 6
_NUM_BEFORE_DESCRIPTOR = 7

# The socket that is bound to the port of the calls by now, by that port: one entry at most.
_bound: dict[int, socket.socket] = {}


def listen_on(bound: socket.socket) -> None:
    """Have a ``TCPStore`` that this rank serves at the port of ``bound`` listen on that socket.

    Torch's store would bind its own socket, on all network interfaces. ``bound`` is the socket that
    the agent has reserved for MASTER_PORT, on a single machine at the loopback interface. So no
    other user can take the port, and no other machine can reach the store, which asks for no
    secret. The socket outlives a store, so that a rank which connects early for the next group
    waits instead of being refused.

    Args:
        bound: a bound socket, which this module owns from now on; an earlier one is closed.
    """
    from torch import distributed

    if not distributed.is_available():
        return
    is_first = not _bound
    while _bound:
        _bound.popitem()[1].close()
    _bound[bound.getsockname()[1]] = bound
    if is_first:
        expected = (*_STORE_PARAMETERS, "multi_tenant", "master_listen_fd")
        if not of_torch.replace_store_parameters(_listening, expected):
            _bound.popitem()[1].close()


def _listening(plain: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = {**dict(zip(_STORE_PARAMETERS, args, strict=False)), **kwargs}
        ours = _bound.get(given.get("port", 0)) if given.get("is_master") else None
        has_descriptor = len(args) > _NUM_BEFORE_DESCRIPTOR or "master_listen_fd" in kwargs
        if ours is not None and not has_descriptor:
            if group_store.is_served(given["port"]):
                args, kwargs["multi_tenant"] = args[:_NUM_BEFORE_MULTI_TENANT], True
            else:
                # A duplicate, since the store closes what it is given.
                kwargs["master_listen_fd"] = os.dup(ours.fileno())
        plain(self, *args, **kwargs)

    return __init__


# MASTER_PORT as the launch said it for the call that runs, 0 before the first call; the function
# may have set another.
_port_of_call = 0


def meet_at_one_store(port: int) -> None:
    """Have user code's default groups use this package's store, one server for all groups.

    Unpatched, torch starts a store server for each group at MASTER_ADDR and MASTER_PORT. If the
    user's function destroys its group and makes the next, a rank may connect to the first group's
    server, which is about to close: with ten groups in a row on a busy machine, one launch of three
    failed because of it. Only groups of all ranks at ``port`` are affected. A ``TCPStore`` that the
    user's function opens itself stays separate, unless this package's server has the same port.
    Called at the start of each call.
    """
    global _port_of_call
    if not _port_of_call:
        of_torch.replace_store_maker(_meeting)
    _port_of_call = port


def _meeting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def create(host: str, port: int, rank: int, world_size: int, timeout: Any, *rest: Any) -> Any:
        context = current()
        given = port, rank, world_size
        is_ours = port and given == (_port_of_call, context.rank, context.world_size)
        # Torch's elastic agent serves a store of its own, if the user says so.
        if not is_ours or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return plain(host, port, rank, world_size, timeout, *rest)
        at = context.store_port or StorePort(host, port, _bound.get(port))
        return group_store.store_of_next_group(rank, timeout, at)

    return create
