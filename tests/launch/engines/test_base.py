"""A run is listed once its call can be ended; no agent outlives a start that fails."""

from dataclasses import replace
from unittest.mock import Mock

from notebook_accel import wire
from notebook_accel.launch.engines.local import abandon
from tests.launch.control.played import PlayedAgent, played


def test_what_stops_or_kills_a_run_as_soon_as_it_is_listed_is_about_its_call(tmp_path):
    """As another thread may, which finds it in ``runs()``."""
    with played(tmp_path, PlayedAgent(0, 1)) as run:
        call = run.new_call()
        with call.sent(last=False):
            call.stop()
            call.kill()
        said = [run.agent.next() for _ in range(3)]
        expected = [(wire.BeginCall, 1), (wire.Stop, 1), (wire.Kill, 1)]
        assert [(type(message), message.call) for message in said] == expected


def test_an_agent_that_cannot_be_ended_keeps_no_other_alive():
    first, second = PlayedAgent(0), PlayedAgent(1)
    stubborn = replace(first.link, kill=Mock(side_effect=PermissionError("no")))
    abandon([stubborn, second.link])
    assert stubborn.kill.called
    assert second.killed.is_set()
