"""All patches of torch in a rank's process; ``private/of_torch.py`` knows torch's private names.

``NOTEBOOK_ACCEL_TORCH_FIXES=0`` in the environment of a launch leaves torch unpatched. If the
installed torch lacks a function to be patched, or has it with other parameters, that patch is left
out, and the user is told so by a line (:func:`untold`).
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from notebook_accel.private import of_torch
from notebook_accel.rank import group_store
from notebook_accel.rank.this_rank import StorePort, current

# What could not be replaced and was not told yet, in words.
_missing: list[str] = []


def untold() -> str:
    """Return a line for the user: the patches that do not apply to this torch.

    "" if all apply, or if an earlier call has returned the line.
    """
    found, _missing[:] = "; ".join(_missing), []
    if not found:
        return ""
    version = sys.modules["torch"].__version__
    return (
        f"torch {version} lacks what notebook_accel replaces in it, or has it with other "
        f"parameters, so that ranks run without: {found}. Update notebook_accel, or install an "
        "older torch"
    )


def _is_on() -> bool:
    return of_torch.is_to_replace(os.environ)


def _note(applies: bool, without: str) -> None:
    if not applies and without not in _missing:
        _missing.append(without)


# The key of the object that torch stashes for each thread of a backward; here nothing is stashed
# under it.
_KEY = "context"


def avoid_hang_when_model_outlives_group() -> None:
    """Patch torch so that a CPU rank may drop its model after it has destroyed its process group.

    Unpatched, this can hang. A backward pass leaves a Python object with each of gloo's reductions,
    and gloo's threads need the GIL to release the object. Dropping the last reference to the group
    joins those threads while holding the GIL. The model often has that last reference
    (pytorch/pytorch#56297 is the general case). The object only serves a backward pass on
    accelerators, so the patch leaves it out on the CPU.
    """
    import torch  # noqa: F401 - imported as late as can be

    if not _is_on() or os.environ.get("ACCELERATE_USE_CPU") != "true":
        return

    def wrap(stash: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
        def unless_context(key: str, arg: Any) -> None:
            if key != _KEY:
                stash(key, arg)

        return unless_context

    _note(of_torch.replace_stash(wrap), "_stash_obj_in_tls (a model may outlive its group)")


def watch_new_groups(making: Callable[[], AbstractContextManager[None]]) -> None:
    """Patch torch so that each process group is made inside ``with making():``.

    ``making()`` lets the caller record the group's sockets, which is possible only while the group
    is made. A gloo group is returned only once all its ranks have made it. Without this wait, a
    rank could destroy its group right after making it. That closes connections which other ranks
    still wait for, and their ``init_process_group`` fails ("Connection closed by peer").
    """
    if not _is_on() or "torch.distributed.distributed_c10d" not in sys.modules:
        return

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def helper(*args: Any, **kwargs: Any) -> Any:
            with making():
                group, store = plain(*args, **kwargs)
                if _has_gloo(group):
                    _wait_until_all_have(group, store)
            return group, store

        return helper

    _note(
        of_torch.replace_group_maker(wrap),
        "_new_process_group_helper (ranks that wait are freed, and none closes a group early)",
    )


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
        applies = of_torch.replace_store_parameters(_listening, expected)
        _note(applies, "TCPStore.__init__ (a store listens to this machine alone)")
        if not applies:
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


# Whether groups meet so by now, or cannot.
_meets = False
# MASTER_PORT as the launch said it for the call that runs; the function may have set another.
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
    global _port_of_call, _meets
    _port_of_call = port
    if _meets or not _is_on() or "torch.distributed.rendezvous" not in sys.modules:
        return
    _meets = True
    _note(
        of_torch.replace_store_maker(_meeting),
        "_create_c10d_store (a function makes one group after the other)",
    )


def _meeting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def create(host: str, port: int, rank: int, world_size: int, timeout: Any, *rest: Any) -> Any:
        context = current()
        # Before the first call no port is known, which is 0 then.
        is_port_of_call = port != 0 and port == _port_of_call
        is_ours = is_port_of_call and (rank, world_size) == (context.rank, context.world_size)
        # Torch's elastic agent serves a store of its own, if the user says so.
        if not is_ours or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return plain(host, port, rank, world_size, timeout, *rest)
        at = context.store_port or StorePort(host, port, _bound.get(port))
        return group_store.store_of_next_group(rank, timeout, at)

    return create


def forget_half_made_groups() -> None:
    """Reset torch's count of groups, so that all ranks give the next default group the same name.

    Torch names a default group by the number of groups made before. Destroying the group resets the
    number. But a rank that failed to make a group has none to destroy: its next group would have
    another name than the other ranks' group, and it would wait for them for ever. Called when a
    rank has dropped its group.
    """
    if _is_on() and "torch.distributed.distributed_c10d" in sys.modules:
        applies = of_torch.forget_half_made_groups()
        _note(applies, "_world.group_count (ranks meet after one failed to make a group)")
