"""A rank's whole life, from the fork to its exit code."""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import linecache
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import RunStopped
from notebook_accel.launch import payload, rank, wire
from notebook_accel.launch.payload import cells
from notebook_accel.launch.system import processes
from notebook_accel.launch.transport.packet import pack
from notebook_accel.launch.worker import bars, output
from notebook_accel.launch.worker.torch_fixes import mend_backward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from notebook_accel.launch.transport.channel import Channel
    from notebook_accel.launch.transport.scoreboard import Scoreboard

__all__ = ["STACKS_SIGNAL", "Post", "main"]

# faulthandler prints the stacks on it, also while native code holds the GIL.
STACKS_SIGNAL = signal.SIGRTMIN + 7
_POLL_SECONDS = (0.0005, 0.02)
_LINGER_SECONDS = 5.0

# What torch says in a rank when it has lost another rank.
_LOST_PEER = re.compile(
    r"connection (closed|reset) by peer|connection refused|broken pipe|was likely closed"
    r"|remote process exited|store.*(closed|timed? ?out)|failed to (recv|send)"
    r"|socket (timeout|closed)"
    r"|nccl communicator was aborted|ncclremoteerror|connectfullmesh failed|read error.*gloo"
    r"|timed out waiting.*(send|recv)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Post:
    """All that one rank needs to begin; it is inherited by fork."""

    agent: int
    launch: wire.Launch
    rank: int
    local_rank: int
    port: int
    channel: Channel
    board: Scoreboard
    packed: payload.Packed
    log: int
    stacks: int
    unneeded: tuple[int, ...]


def main(post: Post) -> None:
    """Run the function of a launch as one rank; ends the process."""
    processes.die_with_parent(post.agent)
    for fd in post.unneeded:
        with contextlib.suppress(OSError):
            os.close(fd)
    processes.reset_signals()
    output.redirect(post.log)
    faulthandler.register(STACKS_SIGNAL, file=post.stacks, all_threads=True, chain=False)
    sender = _Sender(post.channel)
    context = rank.LaunchedContext(
        rank=post.rank,
        local_rank=post.local_rank,
        world_size=post.launch.world_size,
        local_world_size=len(post.launch.ranks),
        run=post.launch.run,
        send=sender.send,
        board=post.board,
    )
    rank.enter(context)
    _enter_environment(post)
    code = _work(post, context, sender)
    post.board.row(post.local_rank).ended = 1
    if code == 0:
        _wait_for_others(post)
        _close_group()
    sys.exit(code)


class _Sender:
    """Writes messages whole: an interrupt that comes during a write is raised after it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.RLock()
        self._sending = False
        self._interrupted = False
        signal.signal(signal.SIGINT, self._on_interrupt)

    def send(self, message: wire.Message, fds: tuple[int, ...] = ()) -> None:
        with self._lock, self._held(), contextlib.suppress(OSError):
            self._channel.send(message, fds)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        mine = threading.current_thread() is threading.main_thread()
        self._sending = self._sending or mine
        try:
            yield
        finally:
            if mine:
                self._sending = False
        if mine and self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def _on_interrupt(self, _number: int, _frame: Any) -> None:
        if self._sending:
            self._interrupted = True
        else:
            raise KeyboardInterrupt


def _enter_environment(post: Post) -> None:
    """The directory, path and variables of the notebook, and what every rank has of its own."""
    import numpy as np
    import torch

    launch = post.launch
    os.environ.clear()
    os.environ.update(launch.environment)
    os.environ.update(
        RANK=str(post.rank),
        LOCAL_RANK=str(post.local_rank),
        WORLD_SIZE=str(launch.world_size),
        LOCAL_WORLD_SIZE=str(len(launch.ranks)),
        MASTER_PORT=str(post.port),
        NOTEBOOK_ACCEL_RUN=launch.run,
    )
    with contextlib.suppress(OSError):
        os.chdir(launch.directory)
    sys.path[:] = launch.path
    sys.argv[:] = [""]
    _give_notebook_names()
    torch.set_num_threads(launch.num_threads)
    if torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4), "little"))
    torch.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True) >> 1)


def _give_notebook_names() -> None:
    """What a notebook has beside Python's own names: ``display`` prints, there is no shell."""

    def display(*objects: object, **_: object) -> None:
        for value in objects:
            sys.stdout.write(f"{value!r}\n")

    vars(builtins).update(display=display, get_ipython=lambda: None)


def _work(post: Post, context: rank.LaunchedContext, sender: _Sender) -> int:
    """Call the function and report how it ended; gives the exit code."""
    call: Any = None
    try:
        bars.install()
        mend_backward()
        _note_groups(context)
        for name in post.launch.imports:
            import_module(name)
        call = payload.unpack_call(post.packed)
        context.tell(wire.RankStarted)
        _return(context, sender, call, call.function(*call.args, **call.kwargs))
    except BaseException as error:  # the process boundary: whatever it is, the notebook is told
        return _report(context, sender, call, error)
    return 0


def _note_groups(context: rank.LaunchedContext) -> None:
    """Remember that a process group was made: torch forgets it when the group is destroyed."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    plain = getattr(module, "_new_process_group_helper", None)
    if plain is None:
        return

    def helper(*args: Any, **kwargs: Any) -> Any:
        context.made_group = True
        return plain(*args, **kwargs)

    module._new_process_group_helper = helper


def _return(context: rank.LaunchedContext, sender: _Sender, call: Any, value: object) -> None:
    packet, fds = pack(payload.pack_result(value, call))
    message = wire.Returned(
        run=context.run,
        rank=context.rank,
        value=packet,
        is_none=value is None,
        made_group=context.made_group,
        drew_bar=context.drew_bar,
    )
    sender.send(message, fds)
    for fd in fds:
        os.close(fd)


def _report(context: rank.LaunchedContext, sender: _Sender, call: Any, error: BaseException) -> int:
    """Say how the function raised; gives the exit code."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        _return(context, sender, call, None)
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        kind, code = _classify(error)
        text = _format(error)
        if kind in ("exception", "lost peer"):
            sys.stderr.write(text)
        context.tell(
            wire.Raised,
            kind=kind,
            type_name=type(error).__name__,
            text=_text(error),
            traceback=text,
            exitcode=code,
            pickled=payload.pack_exception(error, call) if call is not None else None,
            made_group=context.made_group,
        )
        return code
    return 1


def _classify(error: BaseException) -> tuple[str, int]:
    """The kind of a ``wire.Raised`` and the exit code of the process."""
    if isinstance(error, RunStopped):
        return "stopped", 0
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
            return "exit", 1
        return "exit", error.code & 0xFF
    return ("lost peer" if _lost_peer(error) else "exception"), 1


def _lost_peer(error: BaseException) -> bool:
    """Whether the exception only says that another rank is gone."""
    is_torch = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    is_plain = type(error) is RuntimeError
    return (is_torch or is_plain) and bool(_LOST_PEER.search(str(error)))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # a user's __str__ may raise anything
        return f"<its text could not be made: {type(broken).__name__}: {broken}>"


def _format(error: BaseException) -> str:
    """The traceback from the user's function on, with the cells' own names."""
    try:
        lines = traceback.format_exception(type(error), error, _users_frames(error))
    except Exception:  # a user's __str__ may raise anything
        lines = [*traceback.format_tb(error.__traceback__), f"{type(error).__name__}\n"]
    return cells.name_cells("".join(lines))


def _users_frames(error: BaseException) -> Any:
    """The traceback without our own frames at its top."""
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename == __file__:
        entry = entry.tb_next
    linecache.checkcache()
    return entry or error.__traceback__


def _wait_for_others(post: Post) -> None:
    """Stay until all ranks here ended: what they still have to read may be in our sockets.

    Not for ever: a rank that waits in a collective for one that has returned must be told.
    """
    deadline = time.monotonic() + _LINGER_SECONDS
    rows = [post.board.row(index) for index in range(post.board.num_ranks)]
    pause = _POLL_SECONDS[0]
    with contextlib.suppress(KeyboardInterrupt):
        while not all(row.ended for row in rows) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_SECONDS[1])


def _close_group() -> None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        with contextlib.suppress(Exception):  # the run has its results: nothing depends on it
            distributed.destroy_process_group()
