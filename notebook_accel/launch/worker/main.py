"""The main code of a rank process, from its fork to its exit code: it gets ready and runs calls.

    agent --fork--> main: environment, output, signals --> RankReady
                      |
                      v                     one call (run_call)
          inbox: BeginCall -----> CallStarted ... Returned or Raised --+
                 ^                                                     |
                 +-----------------------------------------------------+
              Shutdown, a call that was the last, or the end of the agent --> exit

The agent is the process that supervises the ranks of a run on this machine. A call is one function
that all ranks run; in a session the same processes run many calls, and keep the globals that
earlier calls defined. Between calls the rank only waits for messages in its inbox, the channel to
the agent. A SIGINT reaches user code only inside of a call (interrupts.py).
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import faulthandler
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from notebook_accel import tpu, wire
from notebook_accel.actions.scoreboard import Scoreboard
from notebook_accel.errors import LaunchError, RunStopped
from notebook_accel.launch import payload
from notebook_accel.launch.payload import Packed, cells, pack, unpack
from notebook_accel.launch.setup import Step, take_over
from notebook_accel.launch.text import wording
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.launch.worker import (
    bars,
    displays,
    exiting,
    flight_recorder,
    groups,
    library_metrics,
    plain_steps,
    spawned,
    streams,
    torch_fixes,
)
from notebook_accel.launch.worker.interrupts import Interrupts, Sender
from notebook_accel.launch.worker.tracebacks import error_text, exit_code, format_error, shorten
from notebook_accel.private import of_libraries, of_torch
from notebook_accel.rank import this_rank
from notebook_accel.system import processes
from notebook_accel.system.limits import free_memory
from notebook_accel.system.modules import OF_TEMPLATE, is_library, modules_of
from notebook_accel.system.own_files import FULL_DISK

# faulthandler writes the stacks on it, also while native code holds the GIL.
STACKS_SIGNAL = signal.SIGRTMIN + 7
# Ends what a rank's own thread has written of the stacks.
END_OF_STACKS = b"\0"
# Pauses of a rank that waits for the others to end: each is longer than the one before.
_FIRST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.02
# A rank that has returned keeps its sockets open for at most so long. A group of NCCL is given as
# long to close.
_LINGER_SECONDS = 5.0
# What torch says in a rank when it has lost another rank: one pattern, and behind it another. As
# one with anything in between, "store.*closed" took 44 s for 132 KB full of "store".
_LOST_PEER = {
    r"connection (closed|reset) by (remote )?peer|connection refused|broken pipe"
    r"|was likely closed|remote process exited|failed to (recv|send)|socket (timeout|closed)"
    r"|nccl communicator was aborted|ncclremoteerror|connectfullmesh failed": "",
    "store": "closed|timed? ?out",
    "read error": "gloo",
    "timed out waiting": "send|recv",
}
_FULL_SHM = (
    "Likely, /dev/shm is full or too small for the batches of a DataLoader's workers: make it "
    "larger (docker run --shm-size=8g), or load in the rank itself (num_workers=0)."
)
_FULL_SHM_OF_NCCL = (
    "Likely, /dev/shm is full or too small for NCCL: make it larger (docker run --shm-size=8g), or "
    'do without, which is slower (env={"NCCL_SHM_DISABLE": "1"}).'
)
# Errors after which a process cannot use its device any more.
_LASTING = (
    "(?i)device-side assert|an illegal (memory access|instruction)|misaligned address|invalid "
    "program counter|unspecified launch failure|hardware stack error|launch timed out|uncorrectable"
)
# Advice by what the text of a RuntimeError says.
_HINTS = {
    r"unable to \w+[^\n]{0,200}(?:</torch_|shared memory)|out of shared memory": _FULL_SHM,
    _LASTING: wording.LASTING_ERROR,
    # NCCL passes data so between GPUs of one machine that cannot reach each other's memory.
    "creating shared memory segment|/dev/shm/nccl": _FULL_SHM_OF_NCCL,
}
# A larger pickle of an exception stays in the rank: its text is enough.
_MAX_PICKLED_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Inherited:
    """What a rank process inherits from its agent by fork.

    Attributes:
        local_rank: index of the rank among ``launch.ranks``.
        store_socket: socket on which rank 0 serves the store of the ranks' process groups; None if
            the ranks are on several machines, or have another store.
        asks: eventfd that the agent writes to when the rank is to tell its stacks and collectives,
            or, if the rank's row says so, to shut down its connections to other ranks.
    """

    agent_pid: int
    launch: wire.Launch
    local_rank: int
    store_socket: socket.socket | None
    channel: Channel
    board: Scoreboard
    log: int
    stacks: int
    asks: int

    @property
    def rank(self) -> int:
        return self.launch.ranks[self.local_rank]


def main(inherited: Inherited, unneeded: Sequence[int]) -> None:
    """Run this forked process as a rank until there are no more calls, then exit the process."""
    processes.die_with_parent(inherited.agent_pid)
    # A rank adopts its orphaned descendants. The agent would else, and would kill them at the end
    # of any rank.
    processes.adopt_orphans()
    for fd in unneeded:
        with contextlib.suppress(OSError):
            os.close(fd)
    processes.reset_signals()
    interrupts = Interrupts(inherited.board.row(inherited.local_rank))
    # Forget the exit functions that came along by fork: only those registered here are called.
    of_libraries.forget_exit_functions()
    worker = Worker(inherited, interrupts)
    streams.redirect(inherited.log, on_lost=worker.report_lost_output)
    # A crash in native code, such as SIGSEGV, writes where it was called.
    faulthandler.enable(file=inherited.stacks, all_threads=False)
    faulthandler.register(STACKS_SIGNAL, file=inherited.stacks, all_threads=True, chain=False)
    code = worker.serve()
    exiting.finish(code, this_rank.current().notice)
    sys.exit(code)


class Worker:
    """Runs one rank: gets it ready, serves its calls and reports how each ended.

    Args:
        first: the first rank of this process; None if this is the first, or the only one.
    """

    def __init__(
        self, inherited: Inherited, interrupts: Interrupts, first: Worker | None = None
    ) -> None:
        launch, store_port = inherited.launch, None
        if inherited.store_socket is not None:
            host, port = inherited.store_socket.getsockname()
            store_port = this_rank.StorePort(host, port, inherited.store_socket)
        self._inherited = inherited
        self._channel = inherited.channel
        self.interrupts = interrupts
        self._sender = Sender(inherited.channel, interrupts)
        self.context = this_rank.LaunchedContext(
            rank=inherited.rank,
            local_rank=inherited.local_rank,
            world_size=launch.world_size,
            local_world_size=len(launch.ranks),
            run=launch.run,
            send=self._sender.send,
            board=inherited.board,
            store_port=store_port,
        )
        self.row = inherited.board.row(inherited.local_rank)
        self._setup_error: BaseException | None = None
        self._group_generation = 0
        # The first call puts another module in the place of this one, which must live on: a module
        # that is freed clears its globals, and its functions still use them.
        self._agents_main = sys.modules["__main__"]
        # The newest module that this process need not report as imported by itself.
        self._newest_module = next(reversed(sys.modules))
        # The notebook's classes and functions that calls brought, which may go back in a later
        # one, by number; None before the first.
        self._sent: Mapping[int, Any] | None = None
        self._first = first or self
        self._stacks: int = first._stacks if first else inherited.stacks
        # Since when collectives count: seconds of wall time, when the newest group was dropped.
        self._groups_since = 0.0
        # Held while connections are shut down for a call: the call does not end meanwhile.
        self._end_lock = threading.Lock()

    def serve(self) -> int:
        """Get ready and run calls until there are no more; return the exit code of the process.

        An error while getting ready is raised by each call instead, so that the user sees it.
        """
        # Threads of the user's have no context of a rank: they get the first one's.
        this_rank.enter(self.context, whole_process=self._first is self)
        groups.act_when_readable(self._inherited.asks, self._heed_agent)
        try:
            self._set_up()
        except BaseException as error:  # whatever it is, the first call tells of it
            self._setup_error = error
        self.context.report(wire.RankReady, host=self._first.context.rank)
        code = self.serve_calls()
        self.row.call_over = 1
        if code == 0 or self.context.left_with_all:
            # Its sockets stay open: others may still read what it sent in its last collective. Not
            # for long: one that waits in a collective for this one fails once they close.
            deadline, pause = time.monotonic() + _LINGER_SECONDS, _FIRST_PAUSE_SECONDS
            while not self._inherited.board.all_ended and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
            groups.close_group_within(_LINGER_SECONDS)
        return code

    def _set_up(self) -> None:
        """Make the process like the notebook's: environment, directory, path; patch libraries."""
        os.environ.clear()
        os.environ.update(self._inherited.launch.environment)
        name_rank(self._inherited)
        enter_notebook(self._inherited.launch)
        os.register_at_fork(after_in_child=self._leave_board)
        replace_libraries()
        torch_fixes.watch_new_groups(self._making_group)

    def _leave_board(self) -> None:
        self.context.count_on(Scoreboard(self._inherited.board.num_ranks))

    def report_lost_output(self, error: OSError) -> None:
        """Tell the user that output of this rank is lost, since its log cannot be written."""
        is_full = error.errno in FULL_DISK
        why, do = ("disk full", "Make room on") if is_full else (error.strerror, "Look after")
        log_dir = self._inherited.launch.log_dir or "the logs"
        self.context.notice(
            f"{why}: what rank {self.context.rank} prints is lost from here on. {do} the disk of "
            f"{log_dir}, or set NOTEBOOK_ACCEL_RUNS to a folder on another one"
        )

    @contextlib.contextmanager
    def _making_group(self) -> Iterator[None]:
        self.context.made_group = True
        with groups.noting_sockets():
            yield
        self.row.is_asynchronous = groups.are_asynchronous()

    def _heed_agent(self) -> None:
        """Do what the agent asks, in a thread: the main thread may wait in native code."""
        if self.row.disconnected_call == self.context.call > 0:
            self.disconnect_if_stuck()
            return
        if os.fstat(self._stacks).st_size == 0:  # else the signal came first
            faulthandler.dump_traceback(file=self._stacks, all_threads=True)
            os.write(self._stacks, END_OF_STACKS)
        begun = flight_recorder.newest(since=self._groups_since, notice=self.context.notice)
        self.context.report(wire.Collectives, begun=begun)

    def serve_calls(self) -> int:
        """Run calls until there are no more; return the exit code of the process.

        It is the code of the last call, 0 after a ``Shutdown``, and 1 if a call cannot be read.
        """
        code = 0
        while True:
            try:
                message, fds = self._channel.receive()
            except (EOFError, OSError):
                # The agent is gone, and its death takes this process with it.
                return code
            except ProtocolError as error:
                # Most likely a call brought a descriptor, and those before it have left none free.
                sys.stderr.write(f"notebook_accel: this rank cannot read its next call: {error}\n")
                return 1
            if isinstance(message, wire.MasterSocket):
                torch_fixes.listen_on(socket.socket(fileno=fds[0]))
            elif isinstance(message, wire.BeginCall):
                code = self._answer(message, fds)
                if message.last:
                    return code
            elif isinstance(message, wire.Shutdown):
                # Each call has said itself how it ended: the exit code says nothing of them.
                return 0

    def _answer(self, message: wire.BeginCall, fds: list[int]) -> int:
        self._enter_call(message)
        ended, fds_of_it = self.run_call(message, fds)
        self._report_imports()
        self.context.end_call()
        self.interrupts.install()
        # Before the message: the next call may come as soon as the agent has it.
        with self._end_lock:
            self.row.call_over = 1
        self._sender.send(ended, fds_of_it)
        is_freed = isinstance(ended, wire.Raised) and not self.context.left_with_all
        if is_freed and (self.row.is_asynchronous or not message.last):
            # Others may wait for this rank in a collective, or its own device for theirs.
            self._drop_group()
        return ended.exitcode if isinstance(ended, wire.Raised) else 0

    def _report_imports(self) -> None:
        """Tell the kernel which libraries rank 0 had to import, so that later ranks have them."""
        if self.context.rank != 0:
            return
        # Only the new ones are looked at: to count a reference to each name, as a copy does, would
        # take each rank megabytes of what it shares with the template.
        new = [*takewhile(lambda name: name != self._newest_module, reversed(sys.modules))][::-1]
        self._newest_module = next(reversed(sys.modules))
        libraries = {*filter(is_library, {name.partition(".")[0] for name in new})}
        if libraries - OF_TEMPLATE:
            self.context.report(wire.Imported, names=tuple(modules_of(libraries, new)))

    def run_call(self, message: wire.BeginCall, fds: list[int]) -> Outcome:
        """Call the function of ``message``; return the result or the error, ready to be sent.

        No exception leaves this method: whatever the function, its unpickling or SIGINT raises
        becomes a part of the outcome.
        """
        if message.keeps_error and self.context.kept_error is not None:
            # The frames of the error before go, with all that they hold of the device's memory.
            # Error, frames and the shell's result refer to each other: dropped alone, they stay.
            error = self.context.kept_error.error
            for one in filter(None, (error, error.__cause__, error.__context__)):
                traceback.clear_frames(one.__traceback__)
                # Each look at a frame's variables has left a copy of them; the next empties it.
                _ = [frame.f_locals for frame, _ in traceback.walk_tb(one.__traceback__)]
            self.context.kept_error = None
        try:
            return self._run(message, fds)
        except KeyboardInterrupt as error:
            # It came while the end of the function was being noted, before interrupts were turned
            # off for it. No second one follows: the agent sends one SIGINT for each call.
            self.interrupts.end_call()
            return _raised(error, self.context, None)

    def _take_over(self, steps: Sequence[Step]) -> None:
        with displays.muted():
            take_over(steps, self.context.notice)

    def _run(self, message: wire.BeginCall, fds: list[int]) -> Outcome:
        context, interrupts = self.context, self.interrupts
        call: payload.UnpackedCall | None = None
        try:
            # Before any interrupt is raised: it closes the descriptors, which nobody else does.
            packed = unpack(message.payload, fds)
            interrupts.begin_call(message.call)
            if self._setup_error is not None:
                raise self._setup_error
            call = payload.unpack_call(packed, sent_before=self._sent, take_over=self._take_over)
            if message.by_value:
                call = replace(call, sent={})
            self._sent = call.sent
            context.report(wire.CallStarted)
            try:
                value = call.function(*call.args, **call.kwargs)
            except (RunStopped, SystemExit) as error:
                _end_forked_child(context, error)
                if isinstance(error, RunStopped) or _is_success(error):
                    _finish(context)
                raise
            _end_forked_child(context)
            _finish(context)
            # Of the last call: what a session's rank cannot send, a later cell has there.
            packed = payload.pack_result(value, call, context.notice if message.last else None)
            # What was printed, by the pickling of the result too, may take long to be written.
            _flush_output()
            # No interrupt is raised from here on: one that comes after the segment is made would
            # lose its descriptor.
            interrupts.end_call()
            return _returned(packed, context, is_none=value is None)
        except BaseException as error:  # the process boundary: the notebook is told of any
            interrupts.end_call()
            _end_forked_child(context, error)
            self.row.has_raised = 1
            if message.keeps_error:
                context.kept_error = this_rank.KeptError(error)
            return _raised(error, context, call, is_ending=interrupts.has_seen(message.call))

    def _enter_call(self, message: wire.BeginCall) -> None:
        streams.reopen_streams(self.report_lost_output)
        if message.group_generation != self._group_generation:
            self._group_generation = message.group_generation
            self._drop_group()
        os.environ["MASTER_PORT"] = str(message.master_port)
        torch_fixes.meet_at_one_store(message.master_port)
        self.context.begin_call(message, has_group=this_rank.has_process_group())
        self.row.is_asynchronous = groups.are_asynchronous()
        if not message.last:
            groups.outlive_failed_collectives()

    def disconnect_if_stuck(self) -> None:
        """Shut down the connections to other ranks, if the current call is stuck in a collective.

        Called in a thread, when the agent asks for it. Does nothing if the agent asked for it in an
        earlier call, if the current call has ended, or if the rank has handled its SIGINT, which
        means that it is not stuck, unless what it does then waits for its device.
        """
        call = self.context.call
        # One that runs Python has seen its KeyboardInterrupt.
        is_free = self.interrupts.has_seen(call) and (
            not self.row.is_asynchronous or self.context.device_is_done(self.context.local_rank)
        )
        with self._end_lock:
            is_meant = self.row.disconnected_call == call == self.context.call
            if is_meant and not self.row.call_over and not is_free:
                self.context.lost_group = True
                groups.disconnect()

    def _drop_group(self) -> None:
        self._groups_since = time.time()
        groups.disconnect()
        groups.close_group()
        of_torch.forget_half_made_groups()


def replace_libraries() -> None:
    """Patch tqdm, displays, warnings, multiprocessing and torch in this rank's process."""
    bars.install()
    displays.install()
    library_metrics.install()
    plain_steps.install()
    streams.report_warnings()
    spawned.install()
    torch_fixes.avoid_hang_when_model_outlives_group()


def name_rank(inherited: Inherited) -> None:
    """Set RANK, WORLD_SIZE and the like in the environment of this process.

    MASTER_PORT comes with each call.
    """
    launch = inherited.launch
    os.environ.update(
        {
            "RANK": str(inherited.rank),
            "LOCAL_RANK": str(inherited.local_rank),
            "WORLD_SIZE": str(launch.world_size),
            "LOCAL_WORLD_SIZE": str(len(launch.ranks)),
            "NOTEBOOK_ACCEL_RUN": launch.run,
        }
    )


def enter_notebook(launch: wire.Launch) -> None:
    """Give this process the notebook's directory, ``sys.path``, thread number and other settings.

    Called in a rank's process; the environment variables must be set before.
    """
    import torch

    # The template may have looked these up, and the fork has inherited the answers.
    tempfile.tempdir = None
    time.tzset()
    try:
        os.chdir(launch.directory)
    except OSError as error:
        raise LaunchError(
            f"the notebook's folder {launch.directory!r} cannot be entered by the ranks: "
            f"{error.strerror}. Change to another one with os.chdir(...), then launch again"
        ) from None
    sys.path[:] = launch.path
    sys.argv[:] = [""]
    # A notebook has this name beside Python's own (and ``display``, which displays.py makes); it
    # gives None, since a rank has no shell.
    vars(builtins).update(get_ipython=lambda: None)
    tpu.load_backends()
    torch.set_num_threads(launch.num_threads)
    pools = sys.modules.get("threadpoolctl")
    if pools is not None and launch.num_threads > 1:
        # Libraries that the template imported have taken its number, which is 1.
        pools.threadpool_limits(launch.num_threads)
    if torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]


# ---- one call ------------------------------------------------------------------------------


# How a call ended in this rank, ready to be sent to the agent: the message and its descriptors.
Outcome = tuple["wire.Returned | wire.Raised", tuple[int, ...]]


def _finish(context: this_rank.LaunchedContext) -> None:
    """Call the functions deferred to the end of the call, such as the wait for a checkpoint."""
    # A copy: each of them takes itself out.
    for finish in tuple(context.before_return.values()):
        finish()


def _end_forked_child(
    context: this_rank.LaunchedContext, error: BaseException | None = None
) -> None:
    """Exit this process if it is a child that the user's function forked; else do nothing.

    Such a child comes back here when it leaves the function, and must not report as the rank.
    """
    if context.is_own_process:
        return
    if error is not None:
        _write_error(format_error(error, caller=__file__))
    _flush_output()
    os._exit(error is not None)


def _returned(packed: Packed, context: this_rank.LaunchedContext, *, is_none: bool) -> Outcome:
    packet, fds = pack(packed)
    message = context.message(
        wire.Returned,
        value=packet,
        is_none=is_none,
        made_group=context.made_group,
        lost_group=context.lost_group,
    )
    return message, fds


def _raised(
    error: BaseException,
    context: this_rank.LaunchedContext,
    call: payload.UnpackedCall | None,
    *,
    is_ending: bool = False,
) -> Outcome:
    """Return the outcome of a call that raised; ``sys.exit(0)`` counts as returning None."""
    if _is_success(error):
        packed = payload.pack_result(None, call)
        _flush_output()
        return _returned(packed, context, is_none=True)
    _flush_output()  # what the function printed stands before its error
    kind, exitcode = _classify(error)
    text = cells.name_cells(format_error(error, caller=__file__))
    hint = _hint(error, text) or _memory_report(error, context)
    if hint:
        text = f"{text.rstrip()}\n\n{hint}\n"
    if kind == "lost peer":
        # The backend guesses that a rank has crashed; this one cannot know what the other did.
        _write_error(
            "this rank lost its connection to one that has returned, failed or left the process "
            "group: the error of the run says which. The backend says:\n"
        )
    if kind in ("exception", "lost peer"):
        _write_error(text)
    _flush_output()
    pickled = payload.pack_exception(error, call) if call is not None else None
    rescued: wire.Packet | None = None
    fds: tuple[int, ...] = ()
    if call is not None and (kind in ("stopped", "interrupted") or is_ending):
        rescued, fds = _pack_training(context, call)
    message = context.message(
        wire.Raised,
        kind=kind,
        type_name=type(error).__name__,
        text=shorten(error_text(error)),
        traceback=shorten(text),
        exitcode=exitcode,
        pickled=pickled if pickled is not None and len(pickled) <= _MAX_PICKLED_BYTES else None,
        rescued=rescued,
        made_group=context.made_group,
    )
    return message, fds


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and exit_code(error) == 0


def _pack_training(
    context: this_rank.LaunchedContext, call: payload.UnpackedCall
) -> tuple[wire.Packet | None, tuple[int, ...]]:
    """Pack this rank's part of the training state, to be saved after the run was stopped."""
    problem: Exception | None = None
    try:
        for part in context.parts_to_rescue(free_memory()):
            try:
                return pack(payload.pack_result(part, call))
            except Exception as error:  # whatever classes of the user's do when they are pickled
                problem = error
    except Exception as error:  # or when they are asked for their state
        problem = error
    if problem is not None:
        context.notice(f"what was being trained could not be rescued: {error_text(problem)}")
    return None, ()


def _classify(error: BaseException) -> tuple[str, int]:
    """Return the ``kind`` of the error for ``wire.Raised``, and the process's exit code."""
    if isinstance(error, RunStopped):
        return "stopped", 0
    # Lightning's Trainer answers an interrupt by sys.exit(1).
    cause = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(cause, KeyboardInterrupt) and not _is_success(error):
        return "interrupted", 130
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            _write_error(f"{error_text(error)}\n")
        return "exit", exit_code(error)
    # Torch raises these types where it loses the connection to another rank.
    is_torch = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    is_plain = type(error) is RuntimeError
    has_lost_peer = (is_torch or is_plain) and _says_lost_peer(error_text(error))
    return ("lost peer" if has_lost_peer else "exception"), 1


def _hint(error: BaseException, traceback: str) -> str:
    """Return advice on full shared memory, or a device that fails for good; "" for other errors."""
    if isinstance(error, OSError):
        # The locks of a loader's queues lie there, as its batches do.
        return _FULL_SHM if error.errno == errno.ENOSPC and "SemLock" in traceback else ""
    text = shorten(error_text(error)) if isinstance(error, RuntimeError) else ""
    return next((hint for pattern, hint in _HINTS.items() if re.search(pattern, text)), "")


def _memory_report(error: BaseException, context: this_rank.LaunchedContext) -> str:
    """Return what takes the memory, if that is what the error lacks, the biggest part first."""
    try:
        parts = context.memory_parts(error)
    except Exception:  # a device after its failure: the error itself says more
        return ""
    biggest = sorted(parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {wording.memory(size)}" for name, size in biggest if size)
    return f"What took the memory of rank {context.rank}: {listed}" if listed else ""


def _says_lost_peer(text: str) -> bool:
    text = shorten(text).lower()
    begins = [(re.search(first, text), then) for first, then in _LOST_PEER.items()]
    return any(begin and re.search(then, text[begin.end() :]) for begin, then in begins)


def _write_error(text: str) -> None:
    """Write to the rank's ``sys.stderr``; ignore any exception that this raises.

    A full disk, or a stream of the user's that raises, must not take the place of the real error.
    """
    with contextlib.suppress(Exception):
        sys.stderr.write(text)


def _flush_output() -> None:
    """Send waiting displays and flush ``sys.stdout`` and ``sys.stderr``."""
    displays.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
