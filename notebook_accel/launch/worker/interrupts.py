"""SIGINT in a rank: a KeyboardInterrupt inside of a call, and nothing outside.

A rank may get the signal when its call has just ended, or before it has read the call that it
is meant for (the agent notes on the scoreboard which call it interrupts). And a message to the
agent must never be torn: an interrupt that comes during a write is raised after it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from notebook_accel.launch import wire
    from notebook_accel.launch.transport.channel import Channel
    from notebook_accel.launch.transport.scoreboard import RankRow

__all__ = ["WAKE_SIGNAL", "Interrupts", "Sender"]

# Wakes a main thread that has a SIGINT to handle and does not know: it was about to sleep, or the
# system gave the signal to another thread. Python runs handlers in the main thread alone, between
# two of its instructions.
WAKE_SIGNAL = signal.SIGRTMIN + 8


class Interrupts:
    """Decides for each SIGINT whether it is raised, now or a little later."""

    def __init__(self, row: RankRow) -> None:
        """Take SIGINT over.

        Args:
            row: where the agent notes which call it interrupts, and reads whether the rank has
                seen that, or has to be woken.
        """
        self._row = row
        self._call = 0
        self._in_call = False
        self._is_deferring = False
        self._came_meanwhile = False
        self._thread = threading.get_ident()
        self.install()

    def install(self) -> None:
        """Have SIGINT come here, whatever the user's code had made of it."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(WAKE_SIGNAL, lambda *_: None)

    def _raise(self) -> None:
        """Raise the interrupt in the thread of the rank, from a signal handler."""
        raise KeyboardInterrupt

    def begin_call(self, call: int) -> None:
        """Raise them from here on, in the call of this number.

        Raises:
            KeyboardInterrupt: the agent sent one for this call before the rank had read it.
        """
        self._came_meanwhile = False
        self._call = call
        self._in_call = True
        # In this order: one that comes between the two lines is raised by the signal itself.
        if self._row.interrupted_call == call:
            self._note_seen()
            raise KeyboardInterrupt

    def end_call(self) -> None:
        """Raise none from here on."""
        self._in_call = False
        self._came_meanwhile = False

    def has_seen(self, call: int) -> bool:
        """Whether the main thread has got to see that the agent interrupted this call.

        While it is in native code, in a collective for example, it does not.
        """
        return self._row.seen_interrupt == call

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise one that comes inside of the block only at its end."""
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
    """Writes messages to the agent, whole and one at a time, from any thread of the rank."""

    def __init__(self, channel: Channel, interrupts: Interrupts) -> None:
        self._channel = channel
        self._interrupts = interrupts
        # Reentrant: a signal handler or a finalizer may report while its thread is writing.
        self._lock = threading.RLock()
        self._is_writing = False
        self._pid = os.getpid()

    def send(self, message: wire.Message, fds: tuple[int, ...] = ()) -> None:
        """Write the message; blocks. To an agent that is gone, or by a forked child, none is sent.

        The descriptors are closed once they are sent: where the user's code has left none free,
        there is no room for duplicates.

        Inside of another send of the same thread it queues the message, which that one writes
        once its own is whole.
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
