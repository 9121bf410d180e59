"""Interrupts neither tear what must be whole nor get lost."""

import contextlib
import math
import os
import random
import signal
import threading
import time

import pytest

from notebook_accel.system.interrupts import Latch, held, let_through


def _press():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("how", "num_presses", "counts"),
    [
        ({}, 1, [1]),
        # One more than is waited for is raised at once.
        ({}, 2, [1]),
        ({"patience": None}, 5, [1, 2, 3, 4, 5]),
    ],
)
def test_an_interrupt_is_raised_at_the_end_of_the_block(how, num_presses, counts):
    done = []

    def work():
        with held(**how) as presses:
            for _ in range(num_presses):
                _press()
                done.append(presses.count)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == counts
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_inside_of_another_the_outer_one_counts():
    done = []

    def work():
        with held(patience=None) as outer:
            with held():
                _press()
            done.append(outer.count)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]


def test_an_error_of_the_block_stays_when_nobody_pressed():
    with pytest.raises(ValueError, match="mine"), held():
        raise ValueError("mine")


def test_in_another_thread_nothing_changes():
    handlers = []

    def look():
        with held() as presses:
            handlers.append((signal.getsignal(signal.SIGINT), presses.count))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [(signal.default_int_handler, 0)]


def test_an_interrupt_right_before_user_code_is_raised_there(monkeypatch):
    """Between the looks at what is held and the change of handlers: it was held to the very end."""
    install = signal.signal
    done = []

    def press_first(*arguments):
        monkeypatch.undo()
        _press()
        return install(*arguments)

    def work():
        with held():
            monkeypatch.setattr(signal, "signal", press_first)
            with let_through():
                done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not done


def test_another_thread_lets_nothing_of_the_main_one_through():
    """As an inline run in the background, while a cell waits for another run."""
    done = []

    def work():
        with let_through():
            done.append(True)

    def wait():
        with held():
            _press()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert done == [True]


def test_no_interrupt_of_those_who_wait_keeps_a_latch_shut():
    """An Event does not pass: one of some hundred interrupts leaves its lock locked."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(2000):
            latch = Latch()
            _interrupt_waiting(latch)
            setter = threading.Thread(target=latch.set, daemon=True)
            setter.start()
            setter.join(60)
            assert not setter.is_alive()
            assert latch.wait(1)
    finally:
        signal.signal(signal.SIGALRM, before)


def _interrupt_waiting(latch):
    with contextlib.suppress(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.0004))
        while True:
            latch.wait(0.00002)


def test_a_latch_wakes_who_waits():
    latch = Latch()
    assert not latch.wait(0.001)
    threading.Timer(0.05, latch.set).start()
    began = time.monotonic()
    # As long as a session with grace=inf waits for its ranks.
    assert latch.wait(math.inf)
    assert time.monotonic() - began < 20
    latch.set()
    assert latch.wait(0)
