"""A run is listed once its call can be ended; no agent outlives a start that fails."""

from dataclasses import replace

import pytest

from notebook_accel import wire
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.control.run_folder import RunFolder
from notebook_accel.launch.engines import RankPlan, local
from notebook_accel.launch.engines.local import AgentEngine
from notebook_accel.launch.launch_request import LaunchRequest
from tests.launch.control.played import PlayedAgent, played


def test_what_stops_or_kills_a_run_as_soon_as_it_is_listed_is_about_its_call(tmp_path):
    """As another thread may, which finds it in ``runs()``."""
    with played(tmp_path, PlayedAgent(0, 1)) as run:
        [agent] = run.agents
        call = run.new_call()
        with call.sent(last=False):
            call.stop()
            call.kill()
        said = [agent.next() for _ in range(3)]
        expected = [(wire.BeginCall, 1), (wire.Stop, 1), (wire.Kill, 1)]
        assert [(type(message), message.call) for message in said] == expected


def test_an_agent_that_cannot_be_ended_keeps_no_other_alive(monkeypatch, tmp_path):
    agents = PlayedAgent(0), PlayedAgent(1)

    def refused():
        raise PermissionError("no")

    class OfTwo(AgentEngine):
        def plan_ranks(self, request):
            return RankPlan.of_sizes(1, 1)

        def start_agents(self, request, plan, *, run):
            return [replace(agents[0].link, kill=refused), agents[1].link]

    def fails(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(local, "RankPool", fails)
    request = LaunchRequest(name="train", config=LaunchConfig())
    engine = OfTwo()
    with pytest.raises(ZeroDivisionError):
        engine.start_ranks(request, engine.plan_ranks(request), RunFolder(tmp_path))
    assert agents[1].killed.is_set()
