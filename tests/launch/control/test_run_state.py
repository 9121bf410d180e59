"""A run's state after each message: a new value, small, whatever comes."""

from dataclasses import replace

import pytest

from notebook_accel import wire
from notebook_accel.launch.control.run_state import starting
from tests.notebook.states import after, logged


@pytest.fixture
def state():
    return starting(run="r", name="train", world_size=2, started=1.0, notices=("known",))


def test_a_rank_that_starts_late_does_not_undo_a_stop(state):
    state = after(replace(state, status="stopping"), wire.CallStarted(rank=0))
    assert state.status == "stopping"


def test_the_last_value_of_each_metric(state):
    state = after(
        state,
        logged(0, {"loss": 0.5, "acc": 0.1}, step=1),
        logged(0, {"loss": 0.4}, step=2),
        logged(1, {"loss": 9.0}),
    )
    assert state.ranks[0].metrics == {"loss": (2, 0.4), "acc": (1, 0.1)}
    assert state.ranks[1].metrics == {"loss": (None, 9.0)}


# ---- bars ----------------------------------------------------------------------------------


def bar(number, n=0, **fields):
    return wire.Bar(rank=0, bar=number, name=f"bar {number}", n=n, **fields)


def test_the_bar_of_the_epochs_outlives_many_others(state):
    state = after(state, bar(1, 0))
    for number in range(2, 2000):
        state = after(state, bar(number), bar(number, 1, closed=True), bar(1, number))
    bars = state.ranks[0].bars
    assert (bars[0].bar, bars[0].n) == (1, 1999)
    assert bars[-1].bar == 1999
    assert 100 < len(bars) <= 500
    assert len({each.bar for each in bars}) == len(bars)


# ---- displays ------------------------------------------------------------------------------


def displayed(html, display_id="", *, replaces=False):
    data = {"text/html": html}
    return wire.Displayed(rank=0, data=data, display_id=display_id, replaces=replaces)


def shown(state):
    return [(one.number, one.data["text/html"]) for one in state.ranks[0].displays]


def test_a_display_is_replaced_where_it_stands(state):
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


def test_lines_are_counted_and_the_last_ones_kept(state):
    state = after(state, *(wire.Output(rank=0, text=f"{n}\n") for n in range(5000)))
    rank = state.ranks[0]
    assert rank.num_lines == 5000
    assert rank.tail[-1] == "4999"
    assert len(rank.tail) == 2000


def test_after_a_gap_the_tail_starts_anew(state):
    state = after(
        state, wire.Output(rank=0, text="old\nope"), wire.Output(rank=0, text="new\n", skipped=40)
    )
    rank = state.ranks[0]
    assert (rank.tail, rank.open_line) == (("new",), False)
    assert rank.num_lines == 42


def test_what_is_kept_of_a_flood_is_small(state):
    for _ in range(50):
        state = after(state, wire.Output(rank=0, text="x" * 32_768))
    for _ in range(50):
        state = after(state, wire.Output(rank=0, text="\n" + "y" * 32_000))
    assert sum(map(len, state.ranks[0].tail)) < 3_000_000


# ---- notices -------------------------------------------------------------------------------


# ---- ends ----------------------------------------------------------------------------------


def raised(kind):
    return wire.Raised(rank=0, kind=kind, type_name="E", text="t", traceback="tb")


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([wire.Returned(rank=0, value=wire.Packet())], "succeeded"),
        ([raised("exception")], "failed"),
        ([raised("lost peer")], "failed"),
        ([raised("exit")], "failed"),
        ([raised("stopped")], "stopped"),
        ([raised("interrupted")], "stopped"),
        ([wire.RankEnded(rank=0, exitcode=0)], "failed"),
        ([wire.RankEnded(rank=0, signal=9)], "failed"),
        ([wire.RankEnded(rank=0, signal=9, ended_by_agent=True)], "stopped"),
        (
            [wire.Returned(rank=0, value=wire.Packet()), wire.RankEnded(rank=0, signal=9)],
            "succeeded",
        ),
        ([raised("exception"), wire.RankEnded(rank=0, exitcode=1, ended_by_agent=True)], "failed"),
    ],
)
def test_how_a_rank_ended(state, messages, status):
    state = after(state, wire.CallStarted(rank=0), *messages)
    assert state.ranks[0].status == status
    assert state.ranks[0].has_ended


# ---- cost ----------------------------------------------------------------------------------


def test_a_clock_that_is_set_changes_no_duration(monkeypatch):
    state = starting(run="r", name="train", world_size=1, started=1000.0)
    monkeypatch.setattr("time.time", lambda: 1000.0 - 86_400)
    assert 0 <= state.now() - state.started < 60
    monkeypatch.setattr("time.time", lambda: 1000.0 + 86_400)
    assert 0 <= state.now() - state.started < 60
