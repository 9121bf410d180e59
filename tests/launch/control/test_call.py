"""One call, from its sending to its verdict, on a pool whose agent is played by the test."""

import gc
import operator
import time
from dataclasses import replace

import pytest

from notebook_accel import wire
from notebook_accel.errors import RunStopped, WorkerError
from notebook_accel.launch import payload, run_list
from notebook_accel.launch.control import call as calls
from notebook_accel.launch.control import hang, pool
from notebook_accel.launch.payload import pack
from notebook_accel.launch.run import Run
from tests.launch.control.played import SECONDS, PlayedAgent, played
from tests.waiting import eventually


@pytest.fixture
def run(tmp_path):
    """Two ranks behind one agent."""
    with played(tmp_path, PlayedAgent(0, 1)) as run:
        yield run


def listed(call):
    """A run as a launch lists it."""
    run = Run(call, results=call.results)
    run_list.add(run)
    return run


def raised(**fields):
    given = {"kind": "exception", "type_name": "ValueError", "text": "bad", "traceback": "bad\n"}
    return {**given, **fields}


def stop_both(agent, call):
    for rank in (0, 1):
        agent.tell(wire.Raised, rank=rank, **raised(kind="stopped"))
    assert call.ended.wait(SECONDS)


def ended_by_a_finalizer(call, during):
    """``during``, in whose first turn the garbage collector finds an object that ends the call."""

    class Owner:
        def __init__(self):
            self.itself = self

        def __del__(self):
            call.stop()

    owners = [Owner()]

    def collecting(*args, **named):
        if owners:
            owners.clear()
            gc.collect()
        return during(*args, **named)

    return collecting


@pytest.mark.parametrize("where", ["the state", "what comes", "what goes"])
def test_a_finalizer_stops_the_call_in_the_thread_of_the_pool(where, run, monkeypatch):
    """It runs wherever Python collects garbage, in the middle of what the thread does."""
    call, channel = run.begin_call(), run.agent.link.channel
    assert isinstance(run.agent.next(), wire.BeginCall)
    owner, name = {
        "the state": (calls, "apply"),
        "what comes": (channel, "drain"),
        "what goes": (channel, "flush"),
    }[where]
    monkeypatch.setattr(owner, name, ended_by_a_finalizer(call, getattr(owner, name)))
    # To look through all that the tests have imported takes long, and a played agent is silent.
    monkeypatch.setattr(pool, "_SILENT_SECONDS", SECONDS)
    run.agent.tell(wire.CallStarted, rank=0)
    run.agent.tell(wire.Notice, text="after it")
    eventually(lambda: "after it" in call.state.notices, what="it was heard")
    assert call.state.status == "stopping"
    assert isinstance(run.agent.next(), wire.Stop)
    stop_both(run.agent, call)
    assert call.state.status == "stopped"


class OfAnotherVersion:
    """What a rank returns, and this process cannot make again."""

    def __reduce__(self):
        return operator.getitem, ({}, "missing")


def test_a_result_that_cannot_be_made_here_says_why_and_not_that_there_is_none(run):
    call = run.begin_call()
    handle = listed(call)
    call.stop()
    packet, _ = pack(payload.pack_result(OfAnotherVersion(), None))
    run.agent.tell(wire.Returned, rank=0, value=packet)
    run.agent.tell(wire.Raised, rank=1, **raised(kind="stopped"))
    assert call.ended.wait(SECONDS)
    with pytest.raises(KeyError, match="missing"):
        handle[0]
    with pytest.raises(RunStopped, match="rank 1 was stopped before it had a result"):
        handle[1]
    assert handle.results == [None, None]


def test_the_error_names_its_own_run_whatever_was_launched_since(run, tmp_path, monkeypatch):
    monkeypatch.setattr(run_list, "_known", [])
    monkeypatch.setattr(run_list, "_MAX_RUNS", 1)
    call = run.begin_call()
    older = listed(call)
    with played(tmp_path / "other", PlayedAgent(0)) as other:
        newer = listed(other.new_call())
    assert run_list.runs() == [older, newer], "one that goes on stays in the list"
    run.agent.tell(wire.Raised, rank=0, **raised())
    run.agent.tell(wire.Raised, rank=1, **raised())
    assert call.ended.wait(SECONDS)
    typed = f"To see it: import notebook_accel; notebook_accel.find_run({run.folder.id!r}).logs(0)"
    with pytest.raises(WorkerError) as caught:
        older.wait()
    assert str(caught.value).endswith(typed)
    run_list._known[:] = [known for known in run_list._known if known.id != newer.id]
    with pytest.raises(WorkerError, match=r"notebook_accel\.last_run\(\)\.logs\(0\)$"):
        older.wait()


def test_metrics_that_are_lost_are_told_while_the_run_goes_on(run):
    call = run.begin_call()
    run.folder.remove()
    eventually(lambda: call.state.notices, what="it is told")
    run.agent.return_all()
    assert call.ended.wait(SECONDS)
    [notice] = call.state.notices
    assert "were deleted while it went on" in notice


def test_the_view_draws_five_times_a_second_at_most(run):
    call = run.begin_call()
    began = time.monotonic()
    step = 0
    while len(run.view.drawn) < 4:
        assert time.monotonic() < began + SECONDS
        metric = wire.Metric(rank=0, values={"loss": 1.0}, step=step)
        run.agent.tell(wire.Metrics, metrics=(metric,))
        step += 1
        time.sleep(0.002)
    run.agent.return_all()
    assert call.ended.wait(SECONDS)
    # Not from one drawing to the next: the thread that draws may be held up between its look at the
    # clock and the drawing, and then two come close together.
    assert len(run.view.drawn) <= (time.monotonic() - began) / 0.2 + 2
    assert step > len(run.view.drawn)


def test_nothing_new_draws_nothing(run, monkeypatch):
    # That nothing moves for seconds, and that the agent is silent, would be news.
    monkeypatch.setattr(hang, "_QUIET_SECONDS", SECONDS)
    monkeypatch.setattr(pool, "_TELL_SILENCE_SECONDS", SECONDS)
    call = run.begin_call()
    run.agent.tell(wire.CallStarted, rank=0)
    eventually(lambda: call.state.status == "running", what="it runs")
    eventually(lambda: any(state is call.state for _, state in run.view.drawn), what="it was drawn")
    number = len(run.view.drawn)
    until = time.monotonic() + 0.5
    eventually(lambda: time.monotonic() > until, what="time passed")
    assert len(run.view.drawn) == number


def test_a_wait_that_is_over_as_the_call_ends_has_its_end_printed(run, monkeypatch):
    def end():
        run.agent.return_all()
        assert call.ended.wait(SECONDS)

    call, printed = run.begin_call(), []
    assert not call.wait(0)
    monkeypatch.setattr(run.view, "poll", end)
    monkeypatch.setattr(run.view, "print_end", lambda: printed.append(True))
    assert call.wait(0)
    assert printed


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_time_out_stops_and_then_presses_also_what_was_stopped_before(is_stopped, run):
    call = run.begin_call(timeout=SECONDS if is_stopped else 0.1)
    handle = listed(call)
    run.agent.next()
    if is_stopped:
        call.stop()
        call._deadline = 0.0  # the time is over
    kinds = [type(run.agent.next()) for _ in range(4)]
    assert kinds == [wire.Stop, wire.Interrupt, wire.Terminate, wire.Kill]
    assert call.state.timed_out != is_stopped
    stop_both(run.agent, call)
    if is_stopped:
        with pytest.raises(RunStopped, match="stopped before it had a result"):
            handle.wait()
        return
    with pytest.raises(TimeoutError, match=r"ended after timeout=0\.1 s: pass a larger timeout="):
        handle.wait()
    call.state = replace(call.state, rescued_as="run.rescued")
    with pytest.raises(TimeoutError, match=r"; what was being trained is kept: run\.rescued$"):
        handle.wait()


def test_a_stop_while_processes_exit_takes_no_result_back(run):
    call = run.begin_call(last=True, timeout=SECONDS)
    handle = listed(call)
    run.agent.return_all()
    eventually(lambda: call.is_over, what="every rank has returned")
    call.stop()
    call._deadline = 0.0
    kinds = [type(run.agent.next()) for _ in range(3)]
    assert kinds == [wire.BeginCall, wire.Stop, wire.Interrupt], "the time is over"
    assert not call.state.timed_out
    run.agent.end_all()
    assert call.ended.wait(SECONDS)
    assert call.state.status == "succeeded"
    assert handle.wait() is handle
