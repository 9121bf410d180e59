"""The agent's handle of one rank: shared memory and descriptors, state, and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from notebook_accel import wire
from notebook_accel.actions.ending import StepClock
from notebook_accel.actions.scoreboard import RankRow, Scoreboard
from notebook_accel.launch.agent.file_tail import FileTail
from notebook_accel.launch.agent.gauges import Gauges
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.worker.interrupts import WAKE_SIGNAL
from notebook_accel.launch.worker.main import END_OF_STACKS, STACKS_SIGNAL, Inherited
from notebook_accel.system import processes
from notebook_accel.system.own_files import log_path, open_log

# How often a rank is looked at: lines that come ten times a second look live, and views draw five
# times a second.
_OUTPUT_SECONDS = 0.1
_SAMPLE_SECONDS = 0.2
# What a rank counts itself, by one name on the board and in its usage.
_COUNTED = {each.name for each in fields(wire.Usage)} & {*RankRow.__annotations__} - {"step_times"}
# A rank that runs Python has seen its SIGINT by then.
_WAKE_SECONDS = 0.25
# What faulthandler writes on a signal is whole once the file has not grown for this long.
_STACKS_QUIET_SECONDS = 0.1
_STACKS_SECONDS = 5.0
# A rank's own thread that has not written them by then waits for the GIL, which native code holds.
_GIL_SECONDS = 2.0
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}

# What a rank did to its connection, as the rest of a sentence about it.
BROKEN = (
    "closed its connection to the notebook, or wrote into it what is no message (os.closerange, a "
    "library that makes daemons): its result is lost. Close only what you have opened, or do it in "
    "a child process"
)


class RankProcess:
    """The agent's handle of one rank: its process, its connection, and its part of the call.

    Attributes:
        inherited: what the rank's process gets from this one.
        tail: what the rank prints, by the file that it prints into.
        exit_fd: pidfd of the process, readable once the process has ended.
        closed_at: time at which the agent found the connection closed by the rank, in monotonic
            seconds; 0 if the connection is broken for certain (invalid bytes came, or a result
            never did); None while it is open.
    """

    def __init__(
        self,
        local_rank: int,
        launch: wire.Launch,
        board: Scoreboard,
        log_dir: Path,
        store: socket.socket | None,
    ) -> None:
        """Open what the agent shares with the rank, whose process then starts."""
        ours, theirs = socket.socketpair()
        self.rank = launch.ranks[local_rank]
        self.channel = Channel(ours)
        self.row = board.row(local_rank)
        self._stacks = os.memfd_create(f"stacks-{self.rank}")
        self.inherited = Inherited(
            agent_pid=os.getpid(),
            launch=launch,
            local_rank=local_rank,
            store_socket=store,
            channel=Channel(theirs),
            board=board,
            log=open_log(log_dir, self.rank),
            stacks=self._stacks,
            asks=os.eventfd(0),
        )
        self.tail = FileTail(log_path(log_dir, self.rank))
        self.tail.skip()  # the output of the attempt before, where ranks are started again
        self.alive = True
        self.ended_by_agent = False
        self.is_in_call = False
        self.has_started = False
        self.has_returned = False
        self.closed_at: float | None = None
        self._call = 0
        self.clock = StepClock(0.0)
        self._stacks_asked: float | None = None
        self._stacks_signalled = False
        self._wakes_at = 0.0
        # The length of the stacks that were written, and when it was first found to be that.
        self._stacks_grew = (0, 0.0)
        self._next_output = 0.0
        self._next_sample = 0.0
        self._usage: wire.Usage | None = None

    def follow(self, process: Any) -> None:
        """Watch the process that has started, and close what it alone needs.

        Args:
            process: a process of ``multiprocessing``; for TPUs the leader, whose children run the
                ranks (spawning.py).
        """
        self.inherited.channel.close()
        os.close(self.inherited.log)
        self._process = process
        self.pid: int = process.pid
        self.needed_pids: tuple[int, ...] = (self.pid,)
        self.exit_fd = processes.watch_exit(self.pid)
        inherited = self.inherited
        self._gauges = Gauges(inherited.launch.environment, inherited.local_rank, self.pid)

    def descriptors(self) -> tuple[int, ...]:
        """Return the agent's descriptors for this rank, for ranks forked later to close."""
        return (
            self.channel.fileno(),
            self.exit_fd,
            self._stacks,
            self.inherited.asks,
            self.tail.fileno(),
            self._process.sentinel,
        )

    def move(self, pid: int, host: RankProcess) -> None:
        """Follow the rank to another process: a child of the started process, as on TPUs.

        Args:
            pid: of the child, in which the rank runs as a thread.
            host: the rank whose file gets the stack traces of that process; several ranks may be
                threads of the same process.
        """
        with contextlib.suppress(ProcessLookupError):
            # It has died already: then the process that was started ends, too, and is watched.
            watched, self.exit_fd = self.exit_fd, processes.watch_exit(pid)
            os.close(watched)
        self.needed_pids = (pid, self.pid)
        self.pid = pid
        self._stacks = host._stacks
        self._gauges.follow(pid)

    # ---- the call --------------------------------------------------------------------------

    def begin_call(self, message: wire.BeginCall, fds: Sequence[int]) -> None:
        if self.alive:
            self._call = message.call
            self._usage = None
            self.is_in_call = True
            self.has_returned = self.has_started = False
            self.clock = StepClock(time.monotonic())
            self.send(message, fds)

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Send a message to the rank without blocking; do nothing if the channel is closed.

        If the socket is full, the rest waits, and :meth:`observe` tries again.
        """
        if not self.channel.closed:
            self.channel.post(message, fds)
            self._flush()

    def _flush(self) -> None:
        # A rank that is stopped, or has closed its end, must not hold up the others.
        with contextlib.suppress(OSError):
            self.channel.flush(block=False)

    # ---- look ------------------------------------------------------------------------------

    def observe(self, now: float) -> Iterator[wire.Message]:
        """Yield messages for the kernel: new output, changed counters, requested stack traces."""
        if self.channel.num_pending:
            self._flush()
        if now >= self._next_output:
            self._next_output = now + _OUTPUT_SECONDS
            yield from self._new_output()
        if now >= self._next_sample:
            self._next_sample = now + _SAMPLE_SECONDS
            yield from self._new_sample(now)
        if self._stacks_asked is None:
            return
        text, asked = self._stacks_text(), self._stacks_asked
        if len(text) != self._stacks_grew[0]:
            self._stacks_grew = (len(text), now)
        if not text and not self._stacks_signalled and now - asked >= _GIL_SECONDS:
            self._stacks_signalled = True
            self._signal(STACKS_SIGNAL)
        is_whole = text.endswith(END_OF_STACKS.decode())
        if self._stacks_signalled and text:
            is_whole |= now - self._stacks_grew[1] >= _STACKS_QUIET_SECONDS
        if is_whole or now - asked >= _STACKS_SECONDS:
            self._stacks_asked = None
            text = text.rstrip(END_OF_STACKS.decode()) or "the rank did not answer\n"
            yield wire.Stacks(rank=self.rank, text=text)

    def last_news(self) -> Iterator[wire.Message]:
        """Yield the rest of what the rank printed, and its counters, after a call or its end."""
        yield from self._new_output(final=True)
        yield from self._new_sample(time.monotonic())
        if not self.alive and self._stacks_asked is not None:
            yield wire.Stacks(rank=self.rank, text="the rank has ended\n")

    def _new_output(self, *, final: bool = False) -> Iterator[wire.Message]:
        try:
            text, skipped = self.tail.read(final=final)
        except OSError:  # its disk is gone: the run goes on without this output
            return
        if text or skipped:
            yield wire.Output(
                call=self._call,
                rank=self.rank,
                text=text,
                skipped=skipped,
                start=self.tail.start,
                end=self.tail.position,
            )

    def _new_sample(self, now: float) -> Iterator[wire.Message]:
        if self.alive:
            self._gauges.read(now)
        counted = {name: getattr(self.row, name) for name in _COUNTED}
        known = {name: value for name, value in counted.items() if value}
        times = wire.StepTimes(*self.row.step_times)
        usage = wire.Usage(**{**self._gauges.measured, **known}, step_times=times)
        if usage != self._usage:
            self._usage = usage
            yield wire.Sample(call=self._call, rank=self.rank, usage=usage)

    # ---- stacks ----------------------------------------------------------------------------

    def ask_stacks(self) -> None:
        """Ask the rank for the stack traces of all its threads.

        A thread of the rank writes them to a file in memory, and sends ``Collectives`` after that;
        :meth:`observe` yields the text once it is complete. A rank whose thread does not answer is
        asked by a signal. Does nothing if the process has ended, or an earlier request is
        unanswered.
        """
        # faulthandler's signal handler reads the frames of all threads without the GIL. If another
        # thread runs Python meanwhile, that ends the process by SIGSEGV, once in some 20,000 times.
        if self.alive and self._stacks_asked is None:
            os.ftruncate(self._stacks, 0)
            os.lseek(self._stacks, 0, os.SEEK_SET)
            self._stacks_asked = time.monotonic()
            self._stacks_grew = (0, self._stacks_asked)
            self._stacks_signalled = False
            os.eventfd_write(self.inherited.asks, 1)

    def _stacks_text(self) -> str:
        size = os.fstat(self._stacks).st_size
        return os.pread(self._stacks, size, 0).decode(errors="replace")

    def crash_stack(self, number: int) -> str:
        """Return what faulthandler wrote as signal ``number`` ended the process; "" if nothing."""
        if number not in _CRASHES:
            return ""  # it may be of a child, such as a loader's worker
        return self._stacks_text().partition("Fatal Python error: ")[2]

    # ---- act -------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Have the rank's main thread raise KeyboardInterrupt in its call, by SIGINT."""
        # If the signal comes before the rank has read the call, the rank sees this number as it
        # begins the call.
        self.row.interrupted_call = self._call
        self._wakes_at = time.monotonic() + _WAKE_SECONDS
        self._signal(signal.SIGINT)

    def wake_if_unseen(self, now: float) -> None:
        """Send another signal if the rank's main thread has not handled its SIGINT yet.

        If SIGINT comes just as the main thread begins to sleep, or the system gives it to another
        thread, Python runs the handler only at the end of that sleep. The other signal ends the
        sleep; it is sent four times a second at most.
        """
        is_interrupted = self.is_in_call and self.row.interrupted_call == self._call > 0
        if is_interrupted and self.row.seen_interrupt != self._call and now >= self._wakes_at:
            self._wakes_at = now + _WAKE_SECONDS
            self._signal(WAKE_SIGNAL)

    def disconnect(self) -> None:
        """Have the rank shut down its connections to other ranks, if it is stuck in a collective.

        The rank itself checks this: it is stuck if its main thread has not handled its SIGINT.
        """
        # Its thread that reads the eventfd may wake in the next call: this says which one is meant.
        self.row.disconnected_call = self._call
        os.eventfd_write(self.inherited.asks, 1)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank's process; SIGKILL goes to its descendants too.

        Does nothing if the process was reaped. SIGTERM and SIGKILL set ``ended_by_agent``.
        """
        if not self.alive:
            return
        if number == signal.SIGKILL:
            self.ended_by_agent = True
            processes.kill_tree([self.pid])
            return
        if number == signal.SIGTERM:
            self.ended_by_agent = True
        self._signal(number)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exit_fd, number)

    def reap(self) -> int:
        """Reap the ended process and close its connection; return its exit code.

        The exit code is negative for a signal, and 1 if it is unknown.
        """
        self.alive = False
        self.is_in_call = False
        os.close(self.exit_fd)
        self.channel.close()
        if self.pid == self._process.pid:
            self._process.join()
            code = self._process.exitcode
        else:
            code = self._process.exit_code_of(self.pid)
        return 1 if code is None else int(code)
