"""Protects work that a KeyboardInterrupt must not tear in the middle.

Python raises a KeyboardInterrupt between any two steps of the main thread. In the middle of
``threading.Condition`` (which ``Event.wait`` and ``Thread.start`` use) it leaves a lock locked for
good, and every thread that waits for the lock hangs. In the middle of a message it leaves a
connection whose other end cannot make sense of what follows. So work that must not be torn is done
inside of :func:`held`, and the main thread waits for a :class:`Latch` instead of an ``Event``.

A press is one interrupt of the user; :func:`held` counts the presses that come in its block.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["Latch", "Presses", "held", "let_through"]

# How late a waiter may see that a latch was set, should another one have been interrupted.
_LOOK_SECONDS = 1.0


class Presses:
    """Holds in ``count`` how many interrupts have come in a block of :func:`held` so far."""

    count = 0


@contextmanager
def held(*, patience: int | None = 1) -> Iterator[Presses]:
    """Hold KeyboardInterrupts back within the block, count them, and raise one at its end if any.

    It yields the counter. In other threads than the main one it does nothing, since Python
    interrupts only the main thread.

    Args:
        patience: how many interrupts are held back. One more is raised at once, so that the user
            can end a block that hangs. None holds back all.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield Presses()
        return
    handler = _CountingHandler(previous, patience)
    signal.signal(signal.SIGINT, handler)
    try:
        yield handler.presses
    finally:
        signal.signal(signal.SIGINT, previous)
        if handler.presses.count:
            previous(signal.SIGINT, None)


class _CountingHandler:
    """The handler of SIGINT that :func:`held` installs: counts interrupts and holds them back.

    After ``patience`` interrupts it calls the previous handler, which raises KeyboardInterrupt.
    """

    def __init__(
        self, previous: Callable[[int, FrameType | None], object], patience: int | None
    ) -> None:
        self.presses = Presses()
        self.previous = previous
        self._patience = patience

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.presses.count += 1
        if self._patience is not None and self.presses.count > self._patience:
            self.previous(number, frame)


@contextmanager
def let_through() -> Iterator[None]:
    """Raise interrupts at once within this block, even inside of :func:`held`.

    It is for blocks inside of :func:`held` that run the user's code, which the user may interrupt.
    In other threads than the main one it does nothing, since Python interrupts only the main
    thread.

    Raises:
        KeyboardInterrupt: an interrupt had been held back before this block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    installed = outer = signal.getsignal(signal.SIGINT)
    counting: list[_CountingHandler] = []
    while isinstance(outer, _CountingHandler):
        counting.append(outer)
        outer = outer.previous
    if not counting or not callable(outer):
        yield
        return
    signal.signal(signal.SIGINT, outer)
    try:
        # Looked at once nothing is counted any more: an interrupt in between would wait for long.
        if any(handler.presses.count for handler in counting):
            raise KeyboardInterrupt
        yield
    finally:
        signal.signal(signal.SIGINT, installed)


class Latch:
    """An event that is set once; an interrupt at any point of ``wait`` leaves no lock locked.

    The main thread waits for it instead of a ``threading.Event``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Set the latch and wake all waiters; later calls do nothing."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Wait until the latch is set, at most ``timeout`` seconds; return whether it is set."""
        deadline = time.monotonic() + timeout
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            # An interrupt between acquire and release leaves the lock taken: other waiters then see
            # `_is_set` a little later. And no lock takes infinity as its limit.
            if self._lock.acquire(timeout=min(left, _LOOK_SECONDS)):
                self._lock.release()
        return self._is_set
