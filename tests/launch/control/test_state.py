"""A run's state after each message: a new value, small, whatever comes."""

from __future__ import annotations

import copy
import time
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from notebook_accel.launch import wire
from notebook_accel.launch.control.state import RunState, apply, starting
from tests.notebook.states import after, logged

MESSAGES: list[wire.Message] = [
    wire.AgentReady(pids={0: 11, 1: 12}),
    wire.CallStarted(rank=0, process=21),
    logged(0, {"loss": 0.5}, step=3),
    wire.Bar(rank=0, bar=1, name="epoch", n=1, total=10),
    wire.Notice(text="mind"),
    wire.Output(rank=0, text="hello\n"),
    wire.Sample(rank=0, batches=3, total_batches=10, pass_start=2, steps=4, memory=5),
    wire.Returned(rank=0, value=wire.Packet(header=b""), made_group=True),
    wire.Raised(rank=0, kind="exception", type_name="E", text="", traceback=""),
    wire.RankEnded(rank=0, exitcode=0, wall=9.0),
    wire.Stacks(rank=0, text="here"),
    wire.Displayed(rank=0, data={"text/html": "here"}, display_id="x"),
]


@pytest.fixture
def state() -> RunState:
    return starting(run="r", name="train", world_size=2, started=1.0, notices=("known",))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_the_state_before_stays_as_it_was(state: RunState, message: wire.Message) -> None:
    state = after(state, *MESSAGES[1:7])
    before = copy.deepcopy(state)
    apply(message, state)
    assert state == before
    with pytest.raises(FrozenInstanceError):
        state.status = "running"  # type: ignore[misc]


@pytest.mark.parametrize(
    "message",
    [MESSAGES[1], MESSAGES[3], *MESSAGES[5:]],
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("rank", [2, 99, -1, None])
def test_ranks_that_the_run_does_not_have_change_nothing(
    state: RunState, message: Any, rank: int | None
) -> None:
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    after_it = apply(type(message)(**{**fields, "rank": rank}), state)
    assert after_it.ranks == state.ranks
    logged = wire.Metric(rank=rank, values={"loss": 0.5})
    assert apply(wire.Metrics(metrics=(logged,)), state).ranks == state.ranks


def test_messages_that_say_nothing_of_the_state_give_it_back(state: RunState) -> None:
    for message in (wire.Stop(), wire.Stacks(rank=0, text=""), wire.TemplateReady()):
        assert apply(message, state) is state


def test_a_run_begins(state: RunState) -> None:
    assert (state.status, state.world_size, state.notices) == ("starting", 2, ("known",))
    state = after(state, wire.AgentReady(pids={0: 11, 1: 12}))
    assert [rank.pid for rank in state.ranks] == [11, 12]
    state = after(state, wire.CallStarted(rank=1, process=12))
    assert (state.status, [rank.status for rank in state.ranks]) == (
        "running",
        ["starting", "running"],
    )


def test_a_rank_that_starts_late_does_not_undo_a_stop(state: RunState) -> None:
    state = after(replace(state, status="stopping"), wire.CallStarted(rank=0))
    assert state.status == "stopping"


def test_the_last_value_of_each_metric(state: RunState) -> None:
    state = after(
        state,
        logged(0, {"loss": 0.5, "acc": 0.1}, step=1),
        logged(0, {"loss": 0.4}, step=2),
        logged(1, {"loss": 9.0}),
    )
    assert state.ranks[0].metrics == {"loss": (2, 0.4), "acc": (1, 0.1)}
    assert state.ranks[1].metrics == {"loss": (None, 9.0)}


def test_counters(state: RunState) -> None:
    rank = after(state, MESSAGES[6]).ranks[0]
    assert (rank.batches, rank.total_batches, rank.pass_start, rank.steps, rank.memory) == (
        3,
        10,
        2,
        4,
        5,
    )


# ---- bars ----------------------------------------------------------------------------------


def bar(number: int, n: float = 0, **fields: Any) -> wire.Bar:
    return wire.Bar(rank=0, bar=number, name=f"bar {number}", n=n, **fields)


def test_a_bar_is_updated_in_its_place(state: RunState) -> None:
    state = after(state, bar(1), bar(2), bar(1, 5, rate=2.0), bar(2, 7, closed=True))
    told = [(each.bar, each.n, each.rate, each.closed) for each in state.ranks[0].bars]
    assert told == [(1, 5, 2.0, False), (2, 7, None, True)]


def test_the_bar_of_the_epochs_outlives_many_others(state: RunState) -> None:
    state = after(state, bar(1, 0))
    for number in range(2, 2000):
        state = after(state, bar(number), bar(number, 1, closed=True), bar(1, number))
    bars = state.ranks[0].bars
    assert (bars[0].bar, bars[0].n) == (1, 1999)
    assert bars[-1].bar == 1999
    assert 100 < len(bars) <= 500
    assert len({each.bar for each in bars}) == len(bars)


def test_bars_that_are_never_closed_are_bounded_too(state: RunState) -> None:
    state = after(state, *map(bar, range(1, 2000)))
    assert len(state.ranks[0].bars) <= 500
    assert state.ranks[0].bars[-1].bar == 1999


# ---- displays ------------------------------------------------------------------------------


def displayed(html: str, display_id: str = "", *, replaces: bool = False) -> wire.Displayed:
    data = {"text/html": html}
    return wire.Displayed(rank=0, data=data, display_id=display_id, replaces=replaces)


def shown(state: RunState) -> list[tuple[int, str]]:
    return [(one.number, one.data["text/html"]) for one in state.ranks[0].displays]


def test_a_display_is_replaced_where_it_stands(state: RunState) -> None:
    state = after(state, displayed("a", "x"), displayed("b"), displayed("c", "x", replaces=True))
    assert shown(state) == [(0, "c"), (1, "b")]
    # As in a notebook, what is displayed by the same id once more changes the first one too.
    state = after(state, displayed("d", "x"))
    assert shown(state) == [(0, "d"), (1, "b"), (2, "d")]
    # What was displayed in an earlier call is shown anew in this one, and then replaced there.
    state = after(state, displayed("e", "y", replaces=True), displayed("f", "y", replaces=True))
    assert shown(state)[-1] == (3, "f")
    assert state.ranks[0].num_displays == 4


# ---- output --------------------------------------------------------------------------------


def test_lines_are_counted_and_the_last_ones_kept(state: RunState) -> None:
    state = after(state, *(wire.Output(rank=0, text=f"{n}\n") for n in range(5000)))
    rank = state.ranks[0]
    assert rank.num_lines == 5000
    assert rank.tail[-1] == "4999"
    assert len(rank.tail) == 2000


def test_a_line_that_comes_in_pieces(state: RunState) -> None:
    state = after(state, *(wire.Output(rank=0, text=text) for text in ("a\nb", "c", "d\ne")))
    rank = state.ranks[0]
    assert (rank.tail, rank.open_line, rank.num_lines) == (("a", "bcd", "e"), True, 2)


def test_a_line_that_is_rewritten(state: RunState) -> None:
    state = after(state, *(wire.Output(rank=0, text=f"{n}%\r") for n in range(100)))
    assert state.ranks[0].tail == ("99%",)


def test_after_a_gap_the_tail_starts_anew(state: RunState) -> None:
    state = after(
        state, wire.Output(rank=0, text="old\nope"), wire.Output(rank=0, text="new\n", skipped=40)
    )
    rank = state.ranks[0]
    assert (rank.tail, rank.open_line) == (("new",), False)
    assert (rank.num_lines, rank.skipped_lines) == (42, 40)


def test_what_is_kept_of_a_flood_is_small(state: RunState) -> None:
    for _ in range(50):
        state = after(state, wire.Output(rank=0, text="x" * 32_768))
    for _ in range(50):
        state = after(state, wire.Output(rank=0, text="\n" + "y" * 32_000))
    assert sum(map(len, state.ranks[0].tail)) < 3_000_000


# ---- notices -------------------------------------------------------------------------------


def test_a_notice_is_kept_once(state: RunState) -> None:
    state = after(
        state,
        wire.Notice(rank=0, text="mind"),
        wire.Notice(rank=1, text="mind"),
        wire.Notice(text="known"),
    )
    assert state.notices == ("known", "mind")


# ---- ends ----------------------------------------------------------------------------------


def raised(kind: str) -> wire.Raised:
    return wire.Raised(rank=0, kind=kind, type_name="E", text="t", traceback="tb")


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([wire.Returned(rank=0, value=wire.Packet(header=b""))], "succeeded"),
        ([raised("exception")], "failed"),
        ([raised("lost peer")], "failed"),
        ([raised("exit")], "failed"),
        ([raised("stopped")], "stopped"),
        ([raised("interrupted")], "stopped"),
        ([wire.RankEnded(rank=0, exitcode=0)], "failed"),
        ([wire.RankEnded(rank=0, signal=9)], "failed"),
        ([wire.RankEnded(rank=0, signal=9, ended_by_agent=True)], "stopped"),
        (
            [
                wire.Returned(rank=0, value=wire.Packet(header=b"")),
                wire.RankEnded(rank=0, signal=9),
            ],
            "succeeded",
        ),
        ([raised("exception"), wire.RankEnded(rank=0, exitcode=1, ended_by_agent=True)], "failed"),
    ],
)
def test_how_a_rank_ended(state: RunState, messages: list[wire.Message], status: str) -> None:
    state = after(state, wire.CallStarted(rank=0), *messages)
    assert state.ranks[0].status == status
    assert state.ranks[0].has_ended


def test_what_an_end_says(state: RunState) -> None:
    rank = after(state, wire.RankEnded(rank=0, signal=9, ended_by_agent=True, wall=7.0)).ranks[0]
    assert (rank.signal, rank.exitcode, rank.ended_by_agent, rank.ended) == (9, None, True, 7.0)
    packet = wire.Packet(header=b"")
    returned = wire.Returned(rank=0, value=packet, is_none=True, made_group=True)
    rank = after(state, returned).ranks[0]
    assert (rank.returned, rank.returned_none, rank.made_group) == (True, True, True)


# ---- cost ----------------------------------------------------------------------------------


def test_thousands_of_messages_stay_cheap(state: RunState) -> None:
    """The state does not grow with the run: the last thousand cost what the first did."""
    state = after(starting(run="r", name="t", world_size=64, started=0.0))

    def thousand() -> float:
        nonlocal state
        begin = time.process_time()
        for number in range(1000):
            rank = number % 64
            state = after(
                state,
                logged(rank, {"loss": 1.0, f"m{number % 10}": 2.0}, step=number),
                wire.Output(rank=rank, text=f"line {number}\n"),
                wire.Sample(rank=rank, batches=number),
            )
        return time.process_time() - begin

    for _ in range(4):
        thousand()
    warm = min(thousand() for _ in range(3))
    for _ in range(8):
        thousand()
    assert min(thousand() for _ in range(3)) < 3 * warm


def test_a_clock_that_is_set_changes_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    state = starting(run="r", name="train", world_size=1, started=1000.0)
    monkeypatch.setattr("time.time", lambda: 1000.0 - 86_400)
    assert 0 <= state.now() - state.started < 60
    monkeypatch.setattr("time.time", lambda: 1000.0 + 86_400)
    assert 0 <= state.now() - state.started < 60
