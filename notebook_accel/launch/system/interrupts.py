"""Work that the person's Interrupt must not tear in the middle.

A KeyboardInterrupt is raised between any two steps of the main thread. Inside of
``threading.Condition`` (and so ``Event.wait`` and ``Thread.start``) it leaves a lock locked for
good, and whoever else waits for that lock hangs; half-way through a message it leaves a connection
on which nobody understands anything. So such work is done inside of :func:`held`, and the main
thread waits for a :class:`Latch`.

A press is one Interrupt of the person; :func:`held` counts those that come in its block.
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
    """Counts the interrupts that :func:`held` has held back."""

    count = 0


@contextmanager
def held(*, patience: int | None = 1) -> Iterator[Presses]:
    """Hold interrupts back within the block, count them, and raise one at its end.

    Outside of the main thread, which alone is interrupted, it does nothing.

    Args:
        patience: how many are held; one more is raised at once, for what hangs. None: all.
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
    """The handler inside of :func:`held`."""

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
    """Raise interrupts at once within this block, inside of :func:`held`: user code runs here.

    Outside of the main thread it does nothing: only the main thread is interrupted.

    Raises:
        KeyboardInterrupt: one was held already.
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
    """An event that is set once, and whose waiting can be interrupted at any point."""

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
