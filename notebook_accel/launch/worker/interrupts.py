"""SIGINT in a rank: raises KeyboardInterrupt during a call, and does nothing between calls.

The agent sends SIGINT to interrupt a call. It may arrive when that call has just ended, or before
the rank has read the request for that call. The signal does not say which call is meant, so the
agent also writes the call's number to the rank's row of counters in shared memory
(``scoreboard.py``). An interrupt that comes while the rank writes a message to the agent is raised
after the write, so that no message is torn.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from notebook_accel import wire
from notebook_accel.actions.scoreboard import RankRow
from notebook_accel.launch.transport.channel import Channel

# Wakes a main thread that has a SIGINT to handle and does not know: it was about to sleep, or the
# system gave the signal to another thread. Python runs handlers in the main thread alone, between
# two of its instructions.
WAKE_SIGNAL = signal.SIGRTMIN + 8


class Interrupts:
    """The SIGINT handler of a rank: raises KeyboardInterrupt at once, later, or not at all.

    At once during a call; at the end of a :meth:`deferred` block if it comes inside; not at all
    between calls. Make this object in the thread that runs the rank.
    """

    def __init__(self, row: RankRow) -> None:
        self._row = row
        self._call = 0
        self._in_call = False
        self._is_deferring = False
        self._came_meanwhile = False
        self._thread = threading.get_ident()
        self.install()

    def install(self) -> None:
        """Install the rank's signal handlers.

        Called at the start and after each call, since the user's code may have replaced the
        handlers.
        """
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(WAKE_SIGNAL, lambda *_: None)

    def _raise(self) -> None:
        raise KeyboardInterrupt

    def begin_call(self, call: int) -> None:
        """Begin the call with this number: from now on SIGINT raises KeyboardInterrupt."""
        self._came_meanwhile = False
        self._call = call
        self._in_call = True
        # In this order: one that comes between the two lines is raised by the signal itself.
        if self._row.interrupted_call == call:
            self._note_seen()
            raise KeyboardInterrupt

    def end_call(self) -> None:
        """End the call: from now on no SIGINT raises anything, not even a deferred one."""
        self._in_call = False
        self._came_meanwhile = False

    def has_seen(self, call: int) -> bool:
        """Return whether the rank has handled the SIGINT by which the agent interrupted this call.

        Python handles no signal while its main thread is in native code, such as a collective.
        """
        return self._row.seen_interrupt == call

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Delay a KeyboardInterrupt that comes inside of the block until the block's end.

        In threads other than the rank's own it does nothing, since they are never interrupted.
        """
        # Where it is deferred already (a signal handler that reports during a report), the outer
        # block raises it.
        is_outer = threading.get_ident() == self._thread and not self._is_deferring
        if is_outer:
            self._is_deferring = True
        try:
            yield
        finally:
            if is_outer:
                self._is_deferring = False
        if is_outer and self._came_meanwhile:
            self._came_meanwhile = False
            raise KeyboardInterrupt

    def _note_seen(self) -> None:
        self._row.seen_interrupt = self._row.interrupted_call

    def _on_signal(self, _number: int, _frame: Any) -> None:
        self._note_seen()
        if not self._in_call:
            return
        if self._is_deferring:
            self._came_meanwhile = True
        else:
            self._raise()


class Sender:
    """Writes a rank's messages to its agent, from any thread, one at a time and never torn.

    Locks the channel, and delays a KeyboardInterrupt that comes during a write.
    """

    def __init__(self, channel: Channel, interrupts: Interrupts) -> None:
        self._channel = channel
        self._interrupts = interrupts
        # Reentrant: a signal handler or a finalizer may report while its thread is writing.
        self._lock = threading.RLock()
        self._is_writing = False
        self._pid = os.getpid()

    def send(self, message: wire.Message, fds: tuple[int, ...] = ()) -> None:
        """Write a message to the agent; block until the socket has taken it.

        Does nothing in a child that the rank forked, and does not raise if the agent is gone. If
        the thread is inside another ``send`` already (a signal handler reports something), the
        message is queued, and the outer ``send`` writes it after its own.
        """
        # A child of the rank has a copy of the channel, and of a lock that somebody may hold.
        if os.getpid() != self._pid:
            return
        with self._lock, self._interrupts.deferred(), contextlib.suppress(OSError):
            self._channel.hand_over(message, fds)
            # The queue is looked at again after each flush: an inner send may have added a message
            # after the flush had looked last.
            while self._channel.num_pending and not self._is_writing:
                self._is_writing = True
                try:
                    self._channel.flush()
                finally:
                    self._is_writing = False
