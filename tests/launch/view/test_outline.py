from __future__ import annotations

from notebook_accel.launch.control.state import BarState, RankState
from notebook_accel.launch.view.outline import Advance, Pace, advance, spread
from notebook_accel.launch.view.summary import facts, folded, summarise, worth_a_row
from tests.notebook.states import running, succeeded, with_failed


def bar(number: int, name: str, n: float, total: float | None, *, closed: bool = False) -> BarState:
    return BarState(
        rank=0,
        bar=number,
        name=name,
        n=n,
        total=total,
        rate=10.0,
        elapsed=1.0,
        unit="it",
        closed=closed,
    )


def test_a_rank_that_did_nothing_yet_says_nothing() -> None:
    assert advance(RankState(rank=0)) == Advance()


def test_the_newest_bar_counts_open_or_closed() -> None:
    rank = RankState(rank=0, bars=(bar(1, "epochs", 1, 3), bar(2, "train", 50, 100)))
    far = advance(rank)
    assert (far.text, far.fraction, far.remaining) == ("train, epochs 1/3: 50/100", 0.5, "0:05")
    closed = RankState(rank=0, bars=(bar(1, "train", 100, 100, closed=True),))
    assert (advance(closed).text, advance(closed).remaining) == ("train: 100/100", "")


def test_a_bar_without_an_end_has_no_fraction() -> None:
    far = advance(RankState(rank=0, bars=(bar(1, "", 1240, None),)))
    assert (far.text, far.fraction, far.remaining) == ("1,240", None, "")


def test_counters_stand_in_for_a_bar() -> None:
    rank = RankState(rank=0, batches=230, total_batches=100, pass_start=200, steps=115)
    far = advance(rank, pace=7.0)
    assert (far.text, far.fraction) == ("115 steps, 30/100 batches", 0.3)
    assert (far.rate, far.remaining) == ("7.00 batch/s", "0:10")
    assert advance(RankState(rank=0, steps=9)).text == "9 steps"


def test_pace_is_that_of_the_last_seconds() -> None:
    pace = Pace()
    state = running(1)
    for second in range(30):
        batches = second * 10 if second <= 20 else 200 + (second - 20) * 50
        ranks = (RankState(rank=0, batches=batches),)
        pace.see(type(state)(run="", name="", ranks=ranks, started=0.0), now=float(second))
    assert pace.of(0) == 50.0
    assert pace.of(1) is None


def test_spread_is_empty_where_ranks_agree() -> None:
    assert spread({0: 1.0, 1: 1.0}) == ""
    assert spread({0: 1.0, 1: 0.5}) == "0.5 to 1"


def test_many_ranks_fold_and_failed_ones_stay() -> None:
    state = with_failed(running(128), [127])
    shown = worth_a_row(state.ranks)
    assert [rank.rank for rank in shown] == [0, 1, 2, 3, 4, 5, 6, 127]
    assert folded(state.ranks, shown) == "… and 120 more: 120 running"
    assert folded(state.ranks, state.ranks) == ""


def test_the_summary_is_a_table() -> None:
    lines = summarise(succeeded(running(2)), now=0.0)
    assert lines[0] == "train: succeeded, 2 ranks, 42.0 s"
    assert lines[1].split() == ["rank", "state", "progress", "rate", "memory"]
    assert [line.split() for line in lines[2:]] == [
        ["0", "✓", "succeeded"],
        ["1", "✓", "succeeded"],
    ]
    rank = RankState(rank=1, steps=84, memory=5_000_000)
    assert facts(rank, 42.0) == ("1", "● starting", "84 steps", "2.00 step/s", "5 MB")
