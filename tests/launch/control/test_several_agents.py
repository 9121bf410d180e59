"""What waits in the kernel until one agent of a run has said what the others need."""

from __future__ import annotations

from notebook_accel import wire
from notebook_accel.launch.control.several_agents import MessagesForOthers
from tests.descriptors import open_descriptors

CALL = wire.BeginCall(call=1, payload=wire.Packet(), grace=10)


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
