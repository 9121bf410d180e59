"""A rank's messages reach its agent whole, whoever reports in the middle of a report."""

import os
import random
import resource
import signal
import socket
import threading

import pytest

from notebook_accel import wire
from notebook_accel.actions.scoreboard import RankRow
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.worker.interrupts import Interrupts, Sender

pytestmark = pytest.mark.usefixtures("signals_come_back")
NUM_MESSAGES = 20_000


@pytest.fixture
def reporting():
    """A sender, and ``hear()``: all that was heard of it, once it has said that it is ready."""
    ours, theirs = socket.socketpair()
    # Some frames are larger than what the socket takes at once.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, reader, heard = Sender(Channel(ours), Interrupts(RankRow())), Channel(theirs), []

    def read():
        while not isinstance(message := reader.receive()[0], wire.RankReady):
            heard.append(message)

    def hear():
        sender.send(wire.RankReady())
        thread.join(30)
        assert not thread.is_alive()
        return heard

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return sender, hear


def test_a_signal_handler_that_reports_during_a_report(reporting):
    sender, hear = reporting
    num_signals = 0

    def report(*_):
        nonlocal num_signals
        num_signals += 1
        sender.send(wire.Metric(values={"handler": -float(num_signals)}))

    signal.signal(signal.SIGALRM, report)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    for number in range(NUM_MESSAGES):
        sender.send(wire.Metric(values={"loss": float(number)}))
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # of one that the other thread still has
    heard = [value for message in hear() for value in message.values.values()]
    assert [value for value in heard if value >= 0] == list(range(NUM_MESSAGES))
    # One handler may interrupt another: in any order, each once.
    assert sorted(-value for value in heard if value < 0) == list(range(1, num_signals + 1))


class TickError(Exception):
    """What the signal handler of the user's code raises."""


def test_a_signal_handler_that_raises_during_a_report(reporting):
    sender, hear = reporting
    raised = []

    def tick(*_):
        raise TickError

    signal.signal(signal.SIGALRM, tick)
    number = 0
    while len(raised) < 300:
        number += 1
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00002, 0.0004))
            while True:
                sender.send(wire.Notice(text=f"{number:>5000}"))
                number += 1
        except TickError:
            raised.append(number)
    heard = [int(message.text) for message in hear()]
    assert heard == sorted(set(heard))
    assert set(range(1, number + 1)) - set(heard) <= set(raised)


def test_a_result_goes_out_though_the_function_left_no_descriptor():
    ours, theirs = socket.socketpair()
    sender, reader = Sender(Channel(ours), Interrupts(RankRow())), Channel(theirs)
    reading, writing = os.pipe()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = os.dup(0)
    os.close(unused)
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused, hard))
    try:
        sender.send(wire.Notice(text="with a descriptor"), (writing,))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ((_, (came,)),) = reader.drain()
    os.close(came)
    assert os.read(reading, 1) == b"", "the sender has closed its own"
    os.close(reading)


def test_an_interrupt_waits_for_the_outermost_block():
    interrupts = Interrupts(RankRow())
    interrupts.begin_call(1)
    whole = False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with interrupts.deferred():
            with interrupts.deferred():
                pass
            signal.raise_signal(signal.SIGINT)
            whole = True
    assert whole


def test_an_interrupt_in_a_block_that_fails_is_not_raised_after_the_call():
    interrupts = Interrupts(RankRow())
    interrupts.begin_call(1)
    with pytest.raises(ValueError, match="no message"), interrupts.deferred():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise ValueError("no message")
    interrupts.end_call()
    with interrupts.deferred():
        pass
