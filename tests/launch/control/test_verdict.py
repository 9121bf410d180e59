"""Which rank is the cause of a failure, and what the error says of it and of the others."""

import os
from dataclasses import replace
from itertools import zip_longest

import pytest

from notebook_accel import wire
from notebook_accel.launch.control.pool import AgentEnd
from notebook_accel.launch.control.run_state import RankState, apply, starting
from notebook_accel.launch.control.verdict import hint_lines, judge

LOGS = "/runs/r"


def run(world_size, *messages, agents=()):
    """The state after ``messages``; ``agents`` has the number of each rank's agent."""
    state = starting(run="r", name="train", world_size=world_size, started=0.0)
    ranks = (
        replace(rank, agent=agent) for rank, agent in zip_longest(state.ranks, agents, fillvalue=0)
    )
    state = replace(state, ranks=tuple(ranks))
    for message in messages:
        state = apply(message, state)
    return state


def returned(rank, **fields):
    return wire.Returned(rank=rank, value=wire.Packet(), **fields)


def raised(rank, text="bad", at=10.0, **fields):
    told = {"kind": "exception", "type_name": "ValueError", "traceback": f"Traceback of {rank}\n"}
    return wire.Raised(rank=rank, text=text, wall=at, monotonic=at - 5, **{**told, **fields})


def lost_peer(rank, at=10.0):
    text = "Connection reset by peer"
    return raised(rank, text, at, kind="lost peer", type_name="RuntimeError")


def died(rank, at=10.0, **fields):
    return wire.RankEnded(rank=rank, wall=at, monotonic=at - 5, **fields)


def ended_by_agent(*ranks):
    return [died(rank, 99.0, signal=9, ended_by_agent=True) for rank in ranks]


def verdict(state, **given):
    facts = {"is_stopped": False, "lost": (), "log_dir": LOGS}
    return judge(state, **{**facts, **given})


def failure(state, **given):
    result = verdict(state, **given)
    assert result.status == "failed"
    return result.failure


# ---- no failure ----------------------------------------------------------------------------


def test_an_end_after_the_result_is_of_no_matter():
    state = run(2, returned(0), died(0, signal=11), returned(1), died(1, exitcode=9))
    assert verdict(state).status == "succeeded"


# ---- which is the cause --------------------------------------------------------------------


def test_a_death_comes_before_an_exception_and_that_before_a_lost_peer():
    """Arrival order is not cause."""
    messages = [lost_peer(0, 1.0), raised(1, at=2.0), died(2, 3.0, signal=9)]
    assert failure(run(3, *messages)).rank == 2
    assert failure(run(3, *messages[:2], *ended_by_agent(2))).rank == 1
    assert failure(run(3, messages[0], *ended_by_agent(1, 2))).rank == 0


@pytest.mark.parametrize(
    "kind", [raised, lost_peer, lambda rank, at: died(rank, at=at, exitcode=3)]
)
def test_of_one_kind_the_earliest_is_the_cause(kind):
    assert failure(run(3, kind(0, at=3.0), kind(1, at=1.0), kind(2, at=2.0))).rank == 1


def test_of_two_machines_the_one_that_the_kernel_heard_first_is_the_cause():
    """Their clocks differ by an hour; those of one machine are one."""
    here, there = raised(0, "here", at=3600.0), raised(2, "there", at=10.0)

    def cause(*messages):
        return failure(run(4, *messages, *ended_by_agent(1, 3), agents=(0, 0, 1, 1))).rank

    assert cause(here, there) == 0
    assert cause(there, here) == 2
    # Rank 1 failed before rank 0, and was heard after it: their agent's clock tells.
    earlier = raised(1, "here, earlier", at=3599.0)
    assert cause(here, there, earlier) == 1
    assert cause(there, here, earlier) == 2


def test_a_lost_peer_that_was_heard_first_does_not_bring_its_agents_other_failures_forward():
    messages = [lost_peer(0), raised(2, "first"), raised(1, "second")]
    assert failure(run(3, *messages, agents=(0, 0, 1))).rank == 2


_WORK = (
    "collective operation timeout: WorkNCCL(SeqNum={number}, OpType={kind}, NumelIn=4, NumelOut=4, "
    "Timeout(ms)=600000) ran for 600012 milliseconds before timing out.\n"
)
_FRAMES = (
    "frame #1: c10d::ProcessGroupNCCL::Watchdog::run() + 0x9 (0x7f in libtorch_cuda.so)\n" * 20
)
TIMEOUT = (
    f"[rank{{rank}}]:[E ProcessGroupNCCL.cpp:6] [Rank {{rank}}] Watchdog caught {_WORK}{_FRAMES}"
)
TIMEOUT_AGAIN = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 "
    "PG GUID 0 Rank {rank}] Process group watchdog thread terminated with exception: [Rank {rank}] "
    f"Watchdog caught {_WORK}Exception raised from checkTimeout:\n{_FRAMES}"
)


def test_ncclss_watchdog_is_a_consequence():
    said = wire.Output(rank=0, text="[Rank 0] ProcessGroupNCCL: watchdog caught a timeout\n")
    state = run(2, said, died(0, 1.0, signal=6), raised(1, at=2.0))
    assert failure(state).rank == 1
    # Without its words an abort is a death like any other.
    assert failure(run(2, died(0, 1.0, signal=6), raised(1, at=2.0))).rank == 0


@pytest.mark.parametrize("words", [TIMEOUT, TIMEOUT_AGAIN], ids=["its log", "its exception"])
def test_a_timeout_of_the_watchdog_is_one_line_with_the_odd_one_out_first(words):
    waited = ((0, 7, "ALLREDUCE"), (1, 7, "ALLREDUCE"), (2, 6, "_ALLGATHER_BASE"))
    said = [
        wire.Output(rank=rank, text=words.format(rank=rank, number=number, kind=kind))
        for rank, number, kind in waited
    ]
    aborted = [died(rank, rank, signal=6) for rank in (0, 1, 2)]
    told = failure(run(3, *said, *aborted)).message
    assert told.splitlines()[0] == (
        "a collective took longer than the timeout of its process group: rank 2 waited 600 s in "
        "allgather_base, collective 6; ranks 0-1 waited 600 s in allreduce, collective 7"
    )
    assert "frame #" not in told
    # One that never came was ended by the agent.
    told = failure(run(3, *said[:2], *aborted[:2], *ended_by_agent(2))).message
    assert "group: rank 2 waited in none; ranks 0-1 waited 600 s in allreduce" in told


# ---- which have failed ---------------------------------------------------------------------


def test_peers_that_only_lost_their_connection_are_left_out():
    told = failure(run(4, lost_peer(0), lost_peer(1), raised(2, "real"), *ended_by_agent(3)))
    assert told.ranks == (2,)
    assert "reset by peer" not in told.message
    assert "real" in told.message


GATHER = """Traceback (most recent call last):
  Cell In[3], line 9, in train
    accelerator.gather(loss)
  File "/src/notebook_accel/training/accelerator.py", line 419, in gather
    return collectives.gather(tensor, group=self._data_ranks)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/src/notebook_accel/training/collectives/__init__.py", line 155, in _gather
    all_gather(out, sent, group=group)
  File "/env/site-packages/torch/distributed/distributed_c10d.py", line 4, in all_gather
RuntimeError: Connection closed by peer
"""


def test_who_returned_while_another_one_waits_is_said_before_what_the_backend_says():
    lost = wire.Raised(
        rank=1, kind="lost peer", type_name="RuntimeError", text="closed" * 99, traceback=GATHER
    )
    told = failure(run(2, returned(0), lost))
    first, _, backend, *_ = told.message.splitlines()
    place = "rank 1 still waits in gather at Cell In[3], line 9: every rank must make the same"
    assert first.startswith(f"rank 0 has returned already, while {place}")
    assert backend.startswith("The backend says: RuntimeError: closed")
    assert len(backend) < 200
    assert told.traceback == GATHER
    told = failure(run(2, lost, *ended_by_agent(0)))
    assert told.message.startswith(f"another rank has left the process group, while {place}")


# ---- what it says --------------------------------------------------------------------------


def test_an_exception():
    told = failure(run(2, raised(0, "bad batch\nand more"), *ended_by_agent(1)))
    assert told.message.startswith("rank 0 failed: ValueError: bad batch\n")
    assert told.message.count("Traceback of 0") == 1
    assert f"The whole output of rank 0 is kept in {LOGS}" in told.message
    assert (told.traceback, told.exitcode, told.signal) == ("Traceback of 0\n", 1, None)


@pytest.mark.parametrize(
    ("signal", "name", "likely"),
    [
        (9, "SIGKILL", "out of memory"),
        (11, "SIGSEGV", "native code"),
        (7, "SIGBUS", "/dev/shm"),
        (6, "SIGABRT", "native code"),
        (15, "SIGTERM", "asked"),
        (10, "SIGUSR1", ""),
        (40, "signal 40", ""),
    ],
)
def test_a_signal_is_named_with_its_likely_cause(signal, name, likely):
    said = wire.Output(rank=1, text="".join(f"line {n}\n" for n in range(30)))
    told = failure(run(2, said, died(1, signal=signal), *ended_by_agent(0)))
    assert f"rank 1 was killed by {name}" in told.message
    assert likely in told.message
    assert ("likely" in told.message) == bool(likely)
    assert "line 29" in told.message
    assert "line 5" not in told.message
    assert (told.signal, told.exitcode, told.traceback) == (name, None, "")


def failed_with(text):
    return RankState(rank=0, failure=raised(0, text))


def test_tensors_that_do_not_go_together_lead_to_the_debug_mode():
    words = "data size doesn't match expected size"
    for rank in (failed_with(words), RankState(rank=0, signal=6, tail=("what():", words))):
        empty, hint = hint_lines(rank)
        assert not empty
        assert "debug=True" in hint
    assert hint_lines(failed_with("bad batch")) == hint_lines(RankState(rank=0, signal=9)) == []


def test_memory_of_a_device_that_the_notebook_itself_holds():
    words = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB "
        "of which 1.00 GiB is free. Process {} has 14.00 GiB memory in use. Of the allocated ..."
    )
    assert "this notebook's own kernel" in hint_lines(failed_with(words.format(os.getpid())))[1]
    assert hint_lines(failed_with(words.format(os.getppid()))) == []


def test_ranks_that_failed_alike_share_a_line():
    state = run(
        9,
        raised(0, "alike", 1.0),
        *(raised(rank, "alike", 2.0) for rank in (1, 2, 3, 5)),
        raised(6, "another", 2.0),
        raised(7, "another", 2.0),
        died(8, 2.5, signal=9),
        returned(4),
    )
    told = failure(state)
    assert told.rank == 8
    assert told.ranks == (0, 1, 2, 3, 5, 6, 7, 8)
    assert "ranks 0-3 and 5: ValueError: alike" in told.message
    assert "ranks 6-7: ValueError: another" in told.message
    assert "Traceback" not in told.message


def test_failures_like_the_causes_own():
    told = failure(run(4, *(raised(rank, "alike", 1.0 + rank) for rank in range(4))))
    assert "ranks 1-3 failed in the same way" in told.message
    assert told.message.count("Traceback") == 1
    told = failure(run(2, died(0, 1.0, signal=9), died(1, 2.0, signal=9)))
    assert "rank 1 failed in the same way" in told.message


# ---- after somebody asked for the end ------------------------------------------------------


def test_ranks_that_were_interrupted_or_ended():
    interrupted = raised(0, kind="interrupted", type_name="KeyboardInterrupt")
    state = run(3, interrupted, *ended_by_agent(1), died(2, signal=15, after_interrupt=True))
    assert verdict(state, is_stopped=True).status == "stopped"


def test_what_an_interrupt_breaks_is_no_failure():
    broken = raised(0, "cannot tidy up", after_interrupt=True)
    lost = raised(1, kind="lost peer", after_interrupt=True)
    assert verdict(run(2, broken, lost), is_stopped=True).status == "stopped"
    # Nobody asked for the end: ranks were interrupted since one of them had failed.
    assert verdict(run(2, broken, lost)).status == "failed"


def test_a_peer_that_left_as_it_was_told_was_not_lost_by_a_failure():
    """Of two agents one interrupts its ranks first: the others lose them before their own turn."""
    interrupted = raised(0, kind="interrupted", type_name="KeyboardInterrupt")
    assert verdict(run(2, interrupted, lost_peer(1)), is_stopped=True).status == "stopped"
    # A rank that failed by itself is a failure all the same.
    state = run(3, interrupted, lost_peer(1), raised(2, "before"))
    assert failure(state, is_stopped=True).rank == 2


def test_a_failure_from_before_the_interrupt_stays_one():
    state = run(2, raised(0, "before"), *ended_by_agent(1))
    assert failure(state, is_stopped=True).rank == 0
    state = run(2, died(0, signal=11), *ended_by_agent(1))
    assert failure(state, is_stopped=True).rank == 0


# ---- the agents ----------------------------------------------------------------------------

LOST = AgentEnd("(pid 7) was killed by SIGKILL", ranks=(0, 1, 2))


def test_a_dead_agent_of_several_is_the_cause_of_lost_peers():
    lost = AgentEnd("was lost", ranks=(2, 3))
    state = run(4, lost_peer(0), *ended_by_agent(1, 2, 3), agents=(0, 0, 1, 1))
    told = failure(state, lost=[lost])
    assert (told.rank, told.ranks) == (None, (0, 1, 2, 3))
    assert "watches ranks 2-3 was lost, so that ranks 0-3 ended" in told.message


def test_an_agent_that_died_after_all_results():
    assert verdict(run(2, returned(0), returned(1)), lost=[LOST]).status == "succeeded"


def test_an_agent_that_died_after_a_failure():
    told = failure(run(2, raised(0, "the reason"), *ended_by_agent(1)), lost=[LOST])
    assert told.rank == 0
    assert "the reason" in told.message


def test_a_peer_that_was_killed_for_a_stop_was_not_lost_by_a_failure():
    state = run(2, *ended_by_agent(0), raised(1, kind="lost peer", type_name="RuntimeError"))
    assert verdict(state, is_stopped=True).status == "stopped"
    assert verdict(state).status == "failed"


def test_the_error_holds_nothing_that_a_terminal_obeys():
    bad = "bad\x1b[2J\x9b31m\x00\u202e"
    failed = raised(0, bad, type_name=f"E{bad}", traceback=f"Traceback\n{bad}\n")
    failure = verdict(run(1, failed)).failure
    for text in (failure.message, failure.traceback):
        assert "bad" in text
        assert text.replace("\n", " ").isprintable()
