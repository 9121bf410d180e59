"""Which rank is the cause of a failure, and what the error says of it and of the others."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accel.launch import wire
from notebook_accel.launch.control.state import RunState, apply, starting
from notebook_accel.launch.control.verdict import Failure, Verdict, judge

LOGS = "/runs/r"


def run(world_size: int, *messages: wire.Message) -> RunState:
    state = starting(run="r", name="train", world_size=world_size, started=0.0)
    for message in messages:
        state = apply(message, state)
    return state


def returned(rank: int, **fields: Any) -> wire.Returned:
    return wire.Returned(rank=rank, value=wire.Packet(header=b""), **fields)


def raised(rank: int, text: str = "bad", at: float = 10.0, **fields: Any) -> wire.Raised:
    told = {"kind": "exception", "type_name": "ValueError", "traceback": f"Traceback of {rank}\n"}
    return wire.Raised(rank=rank, text=text, wall=at, monotonic=at - 5, **{**told, **fields})


def lost_peer(rank: int, at: float = 10.0) -> wire.Raised:
    text = "Connection reset by peer"
    return raised(rank, text, at, kind="lost peer", type_name="RuntimeError")


def died(rank: int, at: float = 10.0, **fields: Any) -> wire.RankEnded:
    return wire.RankEnded(rank=rank, wall=at, monotonic=at - 5, **fields)


def ended_by_us(*ranks: int) -> list[wire.Message]:
    return [died(rank, 99.0, signal=9, ours=True) for rank in ranks]


def verdict(state: RunState, **given: Any) -> Verdict:
    facts = {"stopped_at": None, "firm": False, "lost_agent": None, "log_dir": LOGS}
    return judge(state, **{**facts, **given})


def failure(state: RunState, **given: Any) -> Failure:
    result = verdict(state, **given)
    assert result.status == "failed"
    assert result.failure is not None
    return result.failure


# ---- no failure ----------------------------------------------------------------------------


def test_all_returned() -> None:
    assert verdict(run(2, returned(0), returned(1))) == Verdict(status="succeeded")


def test_an_end_after_the_result_is_of_no_matter() -> None:
    state = run(2, returned(0), died(0, signal=11), returned(1), died(1, exitcode=9))
    assert verdict(state).status == "succeeded"


# ---- which is the cause --------------------------------------------------------------------


def test_a_death_comes_before_an_exception_and_that_before_a_lost_peer() -> None:
    """Arrival order is not cause."""
    messages = [lost_peer(0, 1.0), raised(1, at=2.0), died(2, 3.0, signal=9)]
    assert failure(run(3, *messages)).rank == 2
    assert failure(run(3, *messages[:2], *ended_by_us(2))).rank == 1
    assert failure(run(3, messages[0], *ended_by_us(1, 2))).rank == 0


@pytest.mark.parametrize(
    "kind", [raised, lost_peer, lambda rank, at: died(rank, at=at, exitcode=3)]
)
def test_of_one_kind_the_earliest_is_the_cause(kind: Any) -> None:
    assert failure(run(3, kind(0, at=3.0), kind(1, at=1.0), kind(2, at=2.0))).rank == 1


def test_deaths_and_exits_are_told_apart_by_their_time() -> None:
    def left(rank: int, at: float) -> wire.Raised:
        return raised(rank, "4", at, kind="exit", type_name="SystemExit", exitcode=4)

    assert failure(run(2, died(0, 1.0, signal=9), left(1, 2.0))).rank == 0
    assert failure(run(2, died(0, 2.0, signal=9), left(1, 1.0))).rank == 1


def test_at_the_same_time_the_lowest_rank_is_named() -> None:
    assert failure(run(3, *(raised(rank) for rank in (2, 1, 0)))).rank == 0


def test_ncclss_watchdog_is_a_consequence() -> None:
    said = wire.Output(rank=0, text="[Rank 0] ProcessGroupNCCL: watchdog caught a timeout\n")
    state = run(2, said, died(0, 1.0, signal=6), raised(1, at=2.0))
    assert failure(state).rank == 1
    # Without its words an abort is a death like any other.
    assert failure(run(2, died(0, 1.0, signal=6), raised(1, at=2.0))).rank == 0


# ---- which have failed ---------------------------------------------------------------------


def test_peers_that_only_lost_their_connection_are_left_out() -> None:
    told = failure(run(4, lost_peer(0), lost_peer(1), raised(2, "real"), *ended_by_us(3)))
    assert told.ranks == (2,)
    assert "reset by peer" not in told.message
    assert "real" in told.message


def test_where_all_only_lost_each_other_the_first_is_named() -> None:
    told = failure(run(2, lost_peer(0, 2.0), lost_peer(1, 1.0)))
    assert (told.rank, told.ranks) == (1, (1,))
    assert "reset by peer" in told.message


def test_ranks_that_their_agent_ended_have_not_failed() -> None:
    told = failure(run(3, *ended_by_us(0, 2), raised(1)))
    assert (told.rank, told.ranks) == (1, (1,))


# ---- what it says --------------------------------------------------------------------------


def test_an_exception() -> None:
    told = failure(run(2, raised(0, "bad batch\nand more", pickled=b"p"), *ended_by_us(1)))
    assert told.message.startswith("rank 0 failed: ValueError: bad batch\n")
    assert told.message.count("Traceback of 0") == 1
    assert LOGS in told.message
    assert "runs()[-1].logs(0)" in told.message
    assert (told.traceback, told.exitcode, told.signal, told.pickled) == (
        "Traceback of 0\n",
        1,
        None,
        b"p",
    )


def test_an_exception_without_text() -> None:
    assert "rank 0 failed: ValueError\n" in failure(run(1, raised(0, ""))).message


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
def test_a_signal_is_named_with_its_likely_cause(signal: int, name: str, likely: str) -> None:
    said = wire.Output(rank=1, text="".join(f"line {n}\n" for n in range(30)))
    told = failure(run(2, said, died(1, signal=signal), *ended_by_us(0)))
    assert f"rank 1 was killed by {name}" in told.message
    assert likely in told.message
    assert ("likely" in told.message) == bool(likely)
    assert "line 29" in told.message
    assert "line 5" not in told.message
    assert (told.signal, told.exitcode, told.traceback) == (name, None, "")


def test_a_death_with_an_exit_code() -> None:
    told = failure(run(1, died(0, exitcode=3)))
    assert "exit code 3" in told.message
    assert "printed nothing" in told.message
    assert (told.exitcode, told.signal) == (3, None)


def test_sys_exit() -> None:
    said = wire.Output(rank=0, text="I give up\n")
    left = raised(0, "4", kind="exit", type_name="SystemExit", exitcode=4)
    told = failure(run(1, said, left, died(0, exitcode=4)))
    assert "rank 0 ended with exit code 4 (sys.exit)" in told.message
    assert "I give up" in told.message
    assert told.exitcode == 4


def test_ranks_that_failed_alike_share_a_line() -> None:
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


def test_failures_like_the_causes_own() -> None:
    told = failure(run(4, *(raised(rank, "alike", 1.0 + rank) for rank in range(4))))
    assert "ranks 1-3 failed in the same way" in told.message
    assert told.message.count("Traceback") == 1
    told = failure(run(2, died(0, 1.0, signal=9), died(1, 2.0, signal=9)))
    assert "rank 1 failed in the same way" in told.message


# ---- after somebody asked for the end ------------------------------------------------------


def test_a_polite_stop() -> None:
    stopped = [raised(rank, kind="stopped", type_name="RunStopped") for rank in range(2)]
    assert verdict(run(2, *stopped), stopped_at=5.0).status == "stopped"
    assert verdict(run(2, returned(0), returned(1)), stopped_at=5.0).status == "stopped"


def test_ranks_that_were_interrupted_or_ended() -> None:
    interrupted = raised(0, kind="interrupted", type_name="KeyboardInterrupt")
    state = run(3, interrupted, *ended_by_us(1), died(2, 6.0, signal=15))
    assert verdict(state, stopped_at=5.0, firm=True).status == "stopped"


def test_what_an_interrupt_breaks_is_no_failure() -> None:
    state = run(2, raised(0, "cannot tidy up", at=6.0), lost_peer(1, at=6.0))
    assert verdict(state, stopped_at=5.0, firm=True).status == "stopped"


def test_a_failure_from_before_the_stop_stays_one() -> None:
    state = run(2, raised(0, "before", at=4.0), *ended_by_us(1))
    assert failure(state, stopped_at=5.0, firm=True).rank == 0


def test_a_failure_after_a_polite_stop_is_the_functions_own() -> None:
    state = run(2, raised(0, "in its last step", at=6.0), *ended_by_us(1))
    assert failure(state, stopped_at=5.0, firm=False).rank == 0


# ---- the agent -----------------------------------------------------------------------------


def test_a_dead_agent() -> None:
    state = run(3, returned(1), *ended_by_us(0, 2))
    told = failure(state, lost_agent="(pid 7) was killed by SIGKILL")
    assert (told.rank, told.ranks, told.exitcode, told.signal) == (None, (0, 2), None, None)
    assert "(pid 7) was killed by SIGKILL" in told.message
    assert "ranks 0 and 2" in told.message
    assert "launch again" in told.message


def test_an_agent_that_died_after_all_results() -> None:
    assert verdict(run(2, returned(0), returned(1)), lost_agent="x").status == "succeeded"


def test_an_agent_that_died_after_a_failure() -> None:
    told = failure(run(2, raised(0, "the reason"), *ended_by_us(1)), lost_agent="x")
    assert told.rank == 0
    assert "the reason" in told.message


def test_an_agent_that_was_killed_for_a_stop() -> None:
    state = run(2, *ended_by_us(0, 1))
    assert verdict(state, stopped_at=5.0, firm=True, lost_agent="x").status == "stopped"
