"""An agent of the template and its ranks, all of them real, with the kernel's part in the test."""

import faulthandler
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from notebook_accel import wire
from notebook_accel.launch.agent import Agent
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.rank.this_rank import current
from tests.engines.processes import gone
from tests.launch.agents import AgentByHand, agent_by_hand
from tests.waiting import eventually


@pytest.fixture
def agent(tmp_path):
    with agent_by_hand(tmp_path) as agent:
        yield agent


class SlowToUnpickle:
    """Comes late to the function on the rank of the highest number."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        return _come_late, (self.seconds,)


def _come_late(seconds):
    if os.environ["RANK"] == "2":
        time.sleep(seconds)


def raises(*_):
    raise ValueError("alike")


def sleeps():
    print("sleeps", flush=True)
    time.sleep(600)


# ---- start and end -----------------------------------------------------------------------------


def test_a_folder_that_cannot_be_entered_fails_the_call(agent):
    agent.launch(1, directory="/no/such folder")
    agent.call(os.getcwd, last=True)
    raised = agent.wait_for(wire.Raised)
    assert "'/no/such folder' cannot be entered" in raised.text
    assert raised.type_name == "LaunchError"


def test_a_call_waits_for_the_port_of_rank_0_and_what_follows_waits_for_the_call(agent):
    def find_port():
        assert os.environ["MASTER_PORT"] == "4321"

    agent.launch(2, ranks=(1,))
    agent.call(find_port, last=True)
    # Not a stop, for a rank that comes late to the function is interrupted.
    agent.say(wire.Act, number=1, content=msgspec.msgpack.encode(wire.Action(kind="save")))
    agent.say(wire.PortReserved, port=4321)
    agent.say(wire.CallEnded)
    agent.wait_for(wire.PointReached)
    agent.wait_for(wire.Returned)


def test_an_agent_far_away_leaves_no_output_when_the_kernel_goes():
    def name_output():
        current().notice(os.readlink("/proc/self/fd/1"))

    agent = AgentByHand(None)
    try:
        agent.launch(1)
        agent.call(name_output)
        folder = Path(agent.wait_for(wire.Notice).text).parent
        assert folder.is_dir()
        agent.channel.close()
        eventually(lambda: not folder.exists(), what="the folder is gone")
    finally:
        agent.close()


# ---- an end that somebody asks for ---------------------------------------------------------------


def test_a_stop_ends_a_rank_that_a_thread_keeps_after_the_return(agent):
    def go_on():
        threading.Thread(target=time.sleep, args=(600,)).start()

    agent.launch(1)
    agent.call(go_on, last=True)
    agent.wait_for(wire.Returned)
    agent.say(wire.Stop, grace=0.2)
    end = agent.wait_for(wire.RankEnded)
    assert (end.signal, end.ended_by_agent) == (signal.SIGTERM, True)


def test_a_rank_that_left_by_a_stop_keeps_its_threads(agent):
    def leave():
        # A rank that has not read when the stop is asked for is interrupted after the grace.
        while not current().should_stop():
            print("has read", flush=True)
            time.sleep(0.01)
        # Longer than all stages of an end take.
        threading.Thread(target=time.sleep, args=(3,)).start()

    agent.launch(1)
    agent.call(leave, last=True)
    agent.wait_for(wire.Output)
    agent.say(wire.Stop, grace=0.2)
    point = agent.wait_for(wire.PointReached)
    agent.say(wire.ActAt, number=point.number, point=wire.Point(reads=point.passed.reads + 1))
    assert agent.wait_for(wire.RankEnded).exitcode == 0


# ---- a failure ---------------------------------------------------------------------------------


def failures(agent, num_ranks):
    """How each rank ended: the kind of what it raised, "ended" where the agent ended it."""
    ends = {}
    while len(ends) < num_ranks:
        agent.wait_for(wire.Message, len(agent.heard) + 1)
        for message in agent.heard:
            if isinstance(message, wire.Raised):
                ends[message.rank] = "interrupted by us" if message.ended_by_agent else message.kind
            elif isinstance(message, wire.RankEnded) and message.rank not in ends:
                ends[message.rank] = "ended by us" if message.ended_by_agent else "died"
    return ends


def test_a_victim_in_a_session_is_interrupted_and_said_to_be_one(agent):
    agent.launch(3)
    agent.call(lambda: raises() if os.environ["RANK"] == "1" else sleeps())
    assert failures(agent, 3) == {0: "interrupted by us", 1: "exception", 2: "interrupted by us"}


@pytest.mark.parametrize("last", [True, False], ids=["last call", "session"])
def test_a_rank_that_comes_late_to_the_function_fails_by_itself(agent, last):
    agent.launch(3)
    agent.call(raises, SlowToUnpickle(0.7), last=last)
    assert failures(agent, 3) == {0: "exception", 1: "exception", 2: "exception"}


def test_a_rank_that_never_comes_to_the_function_is_not_waited_for(agent):
    agent.launch(3)
    agent.call(raises, SlowToUnpickle(600.0), last=True)
    assert failures(agent, 3) == {0: "exception", 1: "exception", 2: "ended by us"}


def test_a_failure_elsewhere_ends_the_call_here(agent):
    agent.launch(2, world_size=3)
    agent.call(sleeps, last=True)
    agent.all_of(wire.CallStarted, 2)
    agent.say(wire.RankFailed)
    assert failures(agent, 2) == {0: "ended by us", 1: "ended by us"}


def test_a_call_that_comes_with_the_end_of_the_last_rank_hides_it_not(agent):
    pid = agent.launch(1).pids[0]
    agent.wait_for(wire.RankReady)
    # So that it finds both at once, the end first.
    os.kill(agent.pid, signal.SIGSTOP)
    is_at = psutil.Process(agent.pid).status
    eventually(lambda: is_at() == psutil.STATUS_STOPPED, what="it is stopped")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: gone([pid]), what="the rank is dead")
    agent.call(lambda: None)
    os.kill(agent.pid, signal.SIGCONT)
    agent.until_its_end()
    assert agent.wait_for(wire.RankEnded).signal == signal.SIGKILL


def test_the_death_of_a_rank_that_has_returned_ends_the_call_of_no_other(agent):
    # With ranks elsewhere, the agent says so at once where it takes a death for a failure.
    pids = agent.launch(2, world_size=3).pids
    agent.call(lambda: None if os.environ["RANK"] == "1" else sleeps())
    assert agent.wait_for(wire.Returned).rank == 1
    os.kill(pids[1], signal.SIGKILL)
    assert agent.wait_for(wire.RankEnded).rank == 1
    assert not any(isinstance(message, wire.RankFailed) for message in agent.heard)


def test_a_value_that_is_logged_alone_comes_at_once(agent):
    def logs():
        current().metric({"loss": 1.0})
        sleeps()

    agent.launch(1)
    agent.call(logs)
    (metric,) = agent.wait_for(wire.Metrics).metrics
    assert metric.values == {"loss": 1.0}


def test_what_a_rank_that_is_killed_had_logged_comes_before_its_end(agent):
    def logs():
        for step in range(3):
            current().metric({"loss": 1.0}, step)
        os.kill(os.getpid(), signal.SIGKILL)

    agent.launch(1)
    agent.call(logs)
    agent.wait_for(wire.RankEnded)
    metrics = [m for heard in agent.heard if isinstance(heard, wire.Metrics) for m in heard.metrics]
    assert [metric.step for metric in metrics] == [0, 1, 2]


def test_stacks_that_are_written_slowly_are_told_whole(agent):
    """As where another process gets the processor meanwhile."""

    def stands_still():
        plain = faulthandler.dump_traceback

        def dump(file, **how):
            os.write(file, b"Thread 0x1 (most recent call first):\n")
            time.sleep(0.5)
            plain(file, **how)

        faulthandler.dump_traceback = dump
        sleeps()

    agent.launch(1)
    agent.call(stands_still)
    agent.wait_for(wire.Output)
    agent.say(wire.DumpStacks)
    assert "in stands_still" in agent.wait_for(wire.Stacks).text


# ---- an action -----------------------------------------------------------------------------------


def test_what_ranks_say_as_they_act_comes_before_the_word_that_they_did():
    """Whoever set a knob, or saved, looks at once for the new value, or the folder."""
    kernel, ours = map(Channel, socket.socketpair())
    said, heard = map(Channel, socket.socketpair())
    given = {"environment": {}, "directory": "", "path": (), "log_dir": "/", "num_threads": 1}
    agent = Agent(ours, -1, wire.Launch(run="r", world_size=1, ranks=(0,), **given))
    agent.ranks = [SimpleNamespace(rank=0, alive=True, closed_at=None, channel=heard)]
    agent._acting.ask(wire.Act(number=1, content=b""), is_pause=False, refused="", now=0.0)
    # The agent has just looked for messages.
    said.send(wire.KnobMade(name="lr", value=0.5))
    agent._board.row(0).done = 1
    agent._acting.tick(0.0)
    ours.flush()
    assert [type(message) for message, _ in kernel.drain()] == [wire.KnobMade, wire.ActionDone]
    for one in (kernel, ours, said, heard, agent._selector, agent._master, agent._store):
        one.close()
