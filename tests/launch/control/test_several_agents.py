"""What waits in the kernel until one agent of a run has said what the others need."""

from __future__ import annotations

from notebook_accel.launch import wire
from notebook_accel.launch.control.several_agents import MessagesForOthers, StopAnswers
from notebook_accel.launch.transport.scoreboard import LeavePoint
from tests.descriptors import open_descriptors

CALL = wire.BeginCall(call=1, payload=wire.Packet(), grace=10)
FIRST, SECOND = (0, 1), (2, 3)


def test_a_call_and_what_follows_it_wait_for_the_port_but_kill_does_not() -> None:
    others = MessagesForOthers()
    assert not others.keep(wire.Stop(call=1), ())
    others.begin_call()
    before = open_descriptors()
    assert others.keep(CALL, (0,))
    assert others.keep(wire.Stop(call=1), ())
    assert not others.keep(wire.Kill(call=1), ())
    call, stop = (message for message, _ in others.release(4321))
    assert isinstance(call, wire.BeginCall)
    assert call.master_port == 4321
    assert isinstance(stop, wire.Stop)
    assert not others.keep(wire.Stop(call=1), ()), "the port is known"
    others.begin_call()
    assert others.keep(CALL, (0,))
    others.drop()
    assert open_descriptors() - before == set()


def test_ranks_leave_once_every_agent_that_is_left_has_answered() -> None:
    answers = StopAnswers()
    answers.note(FIRST, wire.StopPointReached(batches=7, reads=0, reads_should_stop=False))
    assert answers.leave_point([FIRST, SECOND]) is None
    answers.note(SECOND, wire.StopPointReached(batches=9, reads=0, reads_should_stop=False))
    assert answers.leave_point([FIRST, SECOND]) == LeavePoint(batches=10, reads=1)
    assert answers.leave_point([FIRST, SECOND]) is None, "it is told once"
    answers.note(FIRST, wire.StopPointReached(batches=7, reads=0, reads_should_stop=False))
    assert answers.leave_point([FIRST]) == LeavePoint(batches=8, reads=1)
    assert answers.leave_point([]) is None
