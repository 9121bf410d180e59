"""Protects work that a KeyboardInterrupt must not tear in the middle.

Python raises a KeyboardInterrupt between any two steps of the main thread. Within a method of
``threading.Condition`` (which ``Event.wait`` and ``Thread.start`` use), the interrupt may leave a
lock locked for good, and every thread that waits for the lock hangs. While a message is sent, it
may leave half a message, and the receiver cannot make sense of what follows. So work that must not
be torn is done inside of :func:`held`, and the main thread waits for a :class:`Latch` instead of an
``Event``.

A press is one interrupt by the user; :func:`held` counts the presses that come in its block.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# How late a waiter may see that a latch was set, should another one have been interrupted.
_LOOK_SECONDS = 1.0


class Presses:
    """The handler of SIGINT in a block of :func:`held`; ``count`` is how many it has had so far."""

    def __init__(
        self, previous: Callable[[int, FrameType | None], object], patience: int | None
    ) -> None:
        self.count = 0
        self.previous = previous
        self._patience = patience

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._patience is not None and self.count > self._patience:
            self.previous(number, frame)


@contextmanager
def held(*, patience: int | None = 1) -> Iterator[Presses]:
    """Hold KeyboardInterrupts back in the block; if any came, raise one at the end of the block.

    It yields the counter of the interrupts. In threads other than the main thread nothing is held
    back, since Python interrupts only the main thread.

    Args:
        patience: how many interrupts are held back. Each further interrupt is raised at once, so
            that the user can end a block that hangs. None holds back all.
    """
    previous = signal.getsignal(signal.SIGINT)
    presses = Presses(previous if callable(previous) else signal.default_int_handler, patience)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield presses
        return
    signal.signal(signal.SIGINT, presses)
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, previous)
        if presses.count:
            previous(signal.SIGINT, None)


@contextmanager
def let_through() -> Iterator[None]:
    """Raise interrupts at once within this block, even inside of :func:`held`.

    It is for user code that is run inside of :func:`held`, since the user may interrupt that code.
    In threads other than the main thread it does nothing, since Python interrupts only the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    installed = outer = signal.getsignal(signal.SIGINT)
    counting: list[Presses] = []
    while isinstance(outer, Presses):
        counting.append(outer)
        outer = outer.previous
    if not counting or not callable(outer):
        yield
        return
    signal.signal(signal.SIGINT, outer)
    try:
        # Looked at once nothing is counted any more: an interrupt in between would wait for long.
        if any(handler.count for handler in counting):
            raise KeyboardInterrupt
        yield
    finally:
        signal.signal(signal.SIGINT, installed)


class Latch:
    """An event that is set once, for the main thread to wait for in place of a ``threading.Event``.

    An interrupt at any point of :meth:`wait` makes no thread hang.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Set the latch and wake all threads that wait for it; later calls do nothing."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Wait for the latch to be set, ``timeout`` seconds at most; return whether it is set."""
        deadline = time.monotonic() + timeout
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            # An interrupt between acquire and release leaves the lock taken: other waiters then see
            # `_is_set` a little later. And no lock takes infinity as its limit.
            if self._lock.acquire(timeout=min(left, _LOOK_SECONDS)):
                self._lock.release()
        return self._is_set
