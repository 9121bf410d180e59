"""The pool passes on, keeps its agents in step, and outlives none of them."""

import errno
import struct
from unittest.mock import Mock

import pytest

from notebook_accel import wire
from notebook_accel.actions.scoreboard import STOP
from notebook_accel.launch.control import call as calls
from notebook_accel.launch.control import pool
from notebook_accel.launch.control.hang import HangWatch
from notebook_accel.launch.control.results import Results
from notebook_accel.launch.transport.channel import encode
from tests.launch.control.played import SECONDS, PlayedAgent, played
from tests.waiting import eventually


@pytest.fixture
def one(tmp_path):
    """Two ranks behind one agent."""
    with played(tmp_path, PlayedAgent(0, 1)) as run:
        yield run


@pytest.fixture
def two(tmp_path):
    """A rank behind each of two agents."""
    with played(tmp_path, PlayedAgent(0), PlayedAgent(1)) as run:
        yield run


def begin_on_both(run):
    """The call has come to both agents, and the port to the second."""
    first, second = run.agents
    assert isinstance(first.next(), wire.BeginCall)
    assert isinstance(second.next(), wire.BeginCall)
    first.tell(wire.PortReserved, port=4321)
    told = second.next()
    assert told.port == 4321


# ---- calls -------------------------------------------------------------------------------------


def test_what_comes_late_for_an_old_call_is_dropped(one):
    call = one.begin_call()
    one.agent.next()
    one.agent.return_all(1)
    assert call.ended.wait(SECONDS)
    again = one.begin_call()
    one.agent.next()
    one.agent.tell(wire.Returned, call=1, rank=0, value=wire.Packet())
    one.agent.tell(wire.CallStarted, call=2, rank=1)
    eventually(lambda: again.state.ranks[1].status == "running", what="it came")
    assert not again.state.ranks[0].has_ended


def test_a_call_that_cannot_be_sent_leaves_the_ranks_to_the_next(one, monkeypatch):
    with monkeypatch.context() as patch:
        refused = OSError(errno.EMFILE, "Too many open files")
        patch.setattr(one.agent.link.channel, "post", Mock(side_effect=refused))
        with pytest.raises(OSError, match="Too many open files"):
            one.begin_call()
    call = one.begin_call()
    sent = one.agent.next()
    assert isinstance(sent, wire.BeginCall)
    one.agent.return_all(sent.call)
    assert call.ended.wait(SECONDS)


# ---- an agent that is lost -----------------------------------------------------------------------


def test_an_error_of_our_own_in_a_turn_ends_the_run_and_is_told(one, monkeypatch):
    call = one.begin_call()

    def fails(*_, **__):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(HangWatch, "look", fails)
    assert call.ended.wait(SECONDS)
    assert one.agent.killed.is_set()
    failure = call.state.failure
    assert "ZeroDivisionError: a defect" in failure.message
    assert "in fails" in failure.traceback
    assert one.pool.ended.wait(SECONDS)


def test_an_error_of_our_own_at_the_end_is_told_and_costs_no_rank(one, monkeypatch):
    defect = ZeroDivisionError("a defect")
    monkeypatch.setattr(calls, "closing_advice", Mock(side_effect=defect))
    call = one.begin_call(advise=True)
    one.agent.return_all()
    assert call.ended.wait(SECONDS)
    assert call.state.status == "failed"
    assert "run.results" in call.state.error
    assert "ZeroDivisionError: a defect" in call.state.error
    assert one.view.closed == [call.state]
    one.begin_call()


def test_what_cannot_be_kept_here_is_not_laid_on_the_agent(one, monkeypatch):
    refused = OSError(errno.ENOMEM, "Cannot allocate memory")
    monkeypatch.setattr(Results, "keep", Mock(side_effect=refused))
    call = one.begin_call()
    one.agent.tell(wire.Returned, rank=0, value=wire.Packet())
    assert call.ended.wait(SECONDS)
    assert one.agent.killed.is_set()
    assert "notebook_accel itself failed (OSError: [Errno 12] Cannot" in call.state.error
    assert one.pool.ended.wait(SECONDS)


def test_an_agent_that_talks_nonsense_is_lost(one):
    call = one.begin_call()
    # In one piece with what can be understood, and then nothing more.
    good = encode(wire.CallStarted(run="r", call=1, rank=0))
    one.agent.socket.sendall(struct.pack("!IB", len(good), 0) + good + b"\xff" * 64)
    assert call.ended.wait(SECONDS)
    assert one.agent.killed.is_set()
    assert call.state.status == "failed"


def test_a_call_whose_first_agent_is_lost_before_its_port_is_known(two):
    first, second = two.agents
    call = two.begin_call()
    first.channel.close()
    assert isinstance(second.next(), wire.BeginCall)
    # It waits for the port, which nobody can name any more.
    assert isinstance(second.next(), wire.Kill)
    assert isinstance(second.next(), wire.RankFailed)
    second.tell(wire.RankEnded, call=0, rank=1, signal=9, ended_by_agent=True)
    assert call.ended.wait(SECONDS)


# ---- what agents must know of each other ---------------------------------------------------------


def test_a_stop_before_the_port_is_named_waits_for_all_agents(two):
    first, second = two.agents
    call = two.begin_call()
    call.stop()
    for agent in two.agents:
        assert isinstance(agent.next(), wire.BeginCall)
        assert isinstance(agent.next(), wire.Stop)
    first.tell(wire.PointReached, number=STOP, passed=wire.Passed(batches=0))
    first.tell(wire.PortReserved, port=4321)
    assert isinstance(second.next(), wire.PortReserved)
    call.press(1)
    assert isinstance(second.next(), wire.Interrupt)
    second.tell(wire.PointReached, number=STOP, passed=wire.Passed(batches=3))
    for agent in (second, first):
        while not isinstance(said := agent.next(), wire.ActAt):
            assert isinstance(said, wire.Interrupt)
        assert said.point.batches == 4


def test_a_stop_does_not_wait_for_an_agent_that_is_lost(two):
    two.begin_call()
    begin_on_both(two)
    two.pool.ask_end(wire.Stop, call=1, grace=1.0)
    for agent in two.agents:
        assert isinstance(agent.next(), wire.Stop)
    two.agents[1].tell(wire.PointReached, number=STOP, passed=wire.Passed(batches=5))
    two.agents[0].channel.close()
    kinds = [type(two.agents[1].next()) for _ in range(2)]
    assert kinds == [wire.RankFailed, wire.ActAt]


# ---- an agent that does not answer ---------------------------------------------------------------


def test_an_agent_that_kills_no_rank_is_killed_though_the_call_ends_meanwhile(one, monkeypatch):
    monkeypatch.setattr(pool, "_DEAF_SECONDS", 0.1)
    call = one.begin_call()
    with one.pool.paused():
        one.agent.return_all()
        one.pool.kill()
    assert one.agent.killed.wait(SECONDS)
    assert call.ended.wait(SECONDS)


def test_an_agent_whose_words_were_not_read_yet_is_not_taken_for_silent(one, monkeypatch):
    """As where the kernel itself was held up for long, between its turns to listen and to look."""
    drawn = []

    def be_held_up(state):
        if not drawn:
            one.agent.link.channel.heard -= 1000.0
            one.agent.tell(wire.Alive, call=0)
        drawn.append(state)

    monkeypatch.setattr(one.view, "update", be_held_up)
    call = one.begin_call()
    assert isinstance(one.agent.next(), wire.BeginCall)
    eventually(lambda: bool(drawn), what="a turn of the pool")
    with one.pool.paused():
        assert call.state.notices == ()
    one.agent.return_all()
    assert call.ended.wait(SECONDS)


def test_an_agent_that_reads_nothing_does_not_hold_up_the_caller(two):
    two.begin_call()
    begin_on_both(two)
    for _ in range(5000):
        two.pool.send(wire.Interrupt(run="r", call=1))
    # The first has not read one byte; the second is served all the same.
    assert [type(two.agents[1].next()) for _ in range(5000)] == [wire.Interrupt] * 5000
