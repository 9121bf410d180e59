"""Progress and the summary of a run, as lines of text."""

import math
from dataclasses import replace

from notebook_accel import wire
from notebook_accel.launch.control.run_state import BarState, RankState, starting
from notebook_accel.launch.view.progress import (
    ProgressLine,
    Throughput,
    current_bars,
    progress_lines,
    progress_text,
)
from notebook_accel.launch.view.summary import (
    MAX_NAMED_METRICS,
    condition,
    hidden_ranks,
    rank_facts,
    ranks_with_row,
    summary_lines,
)
from tests.notebook.states import after, logged, running, succeeded, with_failed


def bar(number, name, n, total, **more):
    given = {"rate": 10.0, "elapsed": 1.0, "unit": "it", "closed": False, **more}
    return BarState(rank=0, bar=number, name=name, n=n, total=total, **given)


def at(number, n, *, closed=False):
    """What a rank tells of a bar."""
    return wire.Bar(rank=0, bar=number, name=f"bar {number}", n=n, total=3, closed=closed)


def test_a_rank_that_did_nothing_yet_says_nothing():
    assert progress_lines(RankState(rank=0)) == [ProgressLine()]


def test_a_bar_counts_open_or_closed():
    (line,) = progress_lines(RankState(rank=0, bars=(bar(1, "train", 50, 100),)))
    assert (line.text, line.fraction, line.remaining) == ("train: 50/100", 0.5, "0:05")
    closed = RankState(rank=0, bars=(bar(1, "train", 100, 100, closed=True),))
    (line,) = progress_lines(closed)
    assert (line.text, line.remaining) == ("train: 100/100", "")
    odd = ((3, math.inf, "3/inf"), (math.nan, 10, "nan/10"), (3, 1e300, "3/1e300"))
    for n, total, count in odd:
        (line,) = progress_lines(RankState(rank=0, bars=(bar(1, "odd", n, total),)))
        assert (line.count, round(line.fraction or 0.0, 9), line.remaining) == (count, 0.0, "")


def nested(*, epoch_rate):
    """The second of three epochs, with its bar for training over and the one for evaluation on."""
    return RankState(
        rank=0,
        bars=(
            bar(1, "epochs", 1, 3, rate=epoch_rate),
            bar(2, "train", 100, 100, closed=True, depth=1),
            bar(3, "train", 100, 100, closed=True, depth=1),
            bar(4, "eval", 5, 20, depth=1, rate=1.0),
        ),
    )


def test_all_bars_around_the_newest_one_are_there_and_the_outermost_has_the_time_left():
    lines = progress_lines(nested(epoch_rate=0.1))
    assert [line.text for line in lines] == ["epochs: 1/3", "eval: 5/20"]
    # 15 s of this evaluation, and one epoch of 10 s.
    assert [line.remaining for line in lines] == ["0:25", ""]
    # None has ended yet: one takes as long as the bar inside it, 20 s.
    assert progress_lines(nested(epoch_rate=None))[0].remaining == "0:35"


def test_a_bar_that_was_closed_stays_until_the_next_of_its_depth():
    bars = (bar(1, "epochs", 1, 3), bar(2, "train", 9, 9, closed=True, depth=1))
    assert [b.name for b in current_bars(bars)] == ["epochs", "train"]
    bars = (bar(1, "warm", 9, 9, closed=True), bar(2, "train", 1, 9))
    assert [b.name for b in current_bars(bars)] == ["train"]


def test_a_rank_that_trains_after_its_bars_shows_its_steps():
    def trained(num):
        return wire.Sample(rank=0, usage=wire.Usage(batches=num, steps=num))

    # Scripts of Transformers map a data set and load weights; then only rank 0 draws a bar.
    state = after(running(1), at(0, 0), at(0, 3, closed=True))
    assert progress_text(state.ranks[0]) == "bar 0: 3/3"
    state = after(state, trained(2))
    assert progress_text(state.ranks[0]) == "2 steps, 2 batches"
    # A bar under which the rank trained stays until the next one opens, whatever comes between.
    state = after(state, at(1, 0), trained(4), at(1, 3, closed=True), trained(5))
    assert progress_text(state.ranks[0]) == "bar 1: 3/3"


def test_a_bar_made_before_the_last_one_was_dropped_takes_its_place_when_it_advances():
    # `bar = tqdm(total=3)` in each epoch: the old one is dropped after the new is made.
    state = after(running(1), at(0, 0), at(0, 3), at(1, 0), at(0, 3, closed=True))
    state = after(state, at(1, 1))
    assert progress_text(state.ranks[0]) == "bar 1: 1/3"
    state = after(state, at(2, 0), at(1, 3, closed=True), at(2, 3))
    state = after(state, wire.Returned(rank=0, value=wire.Packet()))
    assert progress_text(state.ranks[0]) == "bar 2: 3/3"


def test_the_depth_of_a_bar_is_how_many_were_open_when_it_came():
    state = after(running(1), at(1, 0), at(2, 0), at(2, 1))
    assert [b.depth for b in state.ranks[0].bars] == [0, 1]
    state = after(state, at(2, 3, closed=True), at(1, 1), at(3, 0))
    assert [b.depth for b in state.ranks[0].bars] == [0, 1, 1]
    state = after(state, at(3, 3, closed=True), at(1, 3, closed=True))
    state = after(state, wire.Returned(rank=0, value=wire.Packet()))
    assert progress_text(state.ranks[0]) == "bar 1: 3/3"


def test_the_rate_is_that_of_the_bar_that_the_progress_names_last():
    rank = nested(epoch_rate=0.1)
    assert rank_facts(rank, 1.0)[2:4] == ("epochs: 1/3, eval: 5/20", "1.00 it/s")
    assert rank_facts(replace(rank, returned=True), 1.0)[2:4] == ("epochs: 1/3", "10.0 s/it")


def test_a_rank_that_lost_a_peer_does_not_look_like_the_culprit():
    lost = wire.Raised(rank=1, kind="lost peer", type_name="E", text="", traceback="")
    state = with_failed(after(running(2), lost), [0])
    assert [condition(rank) for rank in state.ranks] == ["failed", "lost peer"]
    assert rank_facts(state.ranks[1], 1.0)[1] == "○ lost peer"


def test_a_bar_without_an_end_has_no_fraction():
    (far,) = progress_lines(RankState(rank=0, bars=(bar(1, "", 1240, None),)))
    assert (far.text, far.fraction, far.remaining) == ("1,240", None, "")


def test_counters_stand_in_for_a_bar():
    rank = RankState(rank=0, batches=230, total_batches=100, pass_start=200, steps=115)
    (far,) = progress_lines(rank, throughput=7.0)
    assert (far.text, far.fraction) == ("115 steps, 30/100 batches", 0.3)
    assert (far.rate, far.remaining) == ("7.00 batch/s", "0:10")
    assert progress_text(RankState(rank=0, steps=9)) == "9 steps"


def test_throughput_is_that_of_the_last_seconds():
    throughput = Throughput()
    state = running(1)
    for second in range(30):
        batches = second * 10 if second <= 20 else 200 + (second - 20) * 50
        ranks = (RankState(rank=0, batches=batches),)
        state = replace(state, ranks=ranks)
        throughput.note(state, now=float(second))
    assert throughput.of(0) == 50.0
    assert Throughput().of(0) is None


def test_throughput_of_ranks_that_only_draw_bars_is_that_of_the_innermost_ones():
    throughput = Throughput()
    state = replace(running(2), ranks=(nested(epoch_rate=0.1), RankState(rank=1)))
    assert throughput.of_run(state) == (1.0, "it")
    other = replace(nested(epoch_rate=0.1), rank=1, bars=(bar(1, "train", 5, 9, rate=3.0),))
    assert throughput.of_run(replace(state, ranks=(state.ranks[0], other))) == (2.0, "it")
    # What is counted goes before what is drawn.
    for second in range(3):
        counted = replace(state.ranks[0], batches=second * 10)
        throughput.note(replace(state, ranks=(counted,)), now=float(second))
    assert throughput.of_run(replace(state, ranks=(counted,))) == (10.0, "batch")
    assert Throughput().of_run(running(2)) is None


def test_the_rate_of_a_run_is_named_by_a_rank_that_has_one():
    throughput = Throughput()
    for second in range(3):
        # Rank 0 reads no data, as the first rank of a pipeline may.
        ranks = (RankState(rank=0), RankState(rank=1, batches=10 * second))
        state = replace(running(2), ranks=ranks)
        throughput.note(state, now=float(second))
    assert throughput.of_run(state) == (10.0, "batch")


def test_many_ranks_fold_and_failed_ones_stay():
    state = with_failed(running(128), [127])
    shown = ranks_with_row(state.ranks)
    assert [rank.rank for rank in shown] == [0, 1, 2, 3, 4, 5, 6, 127]
    assert hidden_ranks(state.ranks, shown) == "… and 120 more, all running"
    assert hidden_ranks(state.ranks, state.ranks) == ""


def test_the_summary_is_a_table():
    lines = summary_lines(succeeded(running(2)), now=0.0)
    assert lines[0] == "train: succeeded, 2 ranks, 42.0 s"
    assert lines[1].split() == ["rank", "state", "progress", "rate", "memory"]
    assert [line.split() for line in lines[2:]] == [
        ["0", "✓", "succeeded"],
        ["1", "✓", "succeeded"],
    ]
    rank = RankState(rank=1, steps=84, memory=5_000_000)
    assert rank_facts(rank, 42.0) == ("1", "● starting", "84 steps", "2.00 step/s", "5 MB on host")
    on_device = {"device_memory": 2_000_000_000, "device_peak": 3_000_000_000}
    going = RankState(rank=1, status="running", memory=5_000_000, **on_device)
    assert rank_facts(going, 42.0)[-1] == "2.0 GB on device"
    ended = replace(going, ended=1.0)
    assert rank_facts(ended, 42.0)[-1] == "3.0 GB on device, at its peak"


def test_ranks_that_were_not_asked_are_told_from_those_that_ran():
    state = starting(run="id", name="In[3]", world_size=3, started=1000.0, asked=frozenset([1, 2]))
    assert condition(state.ranks[0]) == "not asked"
    title, _, *rows = summary_lines(succeeded(state), now=1042.0)
    assert title.startswith("In[3]: succeeded, ranks 1-2 of 3, ")
    ends = [row.split(maxsplit=1)[1] for row in rows]
    assert ends == ["○ not asked", "✓ succeeded", "✓ succeeded"]
    assert progress_lines(succeeded(state).ranks[0])[0].fraction is None


def test_of_many_metrics_the_first_are_named():
    values = {f"m{number}": float(number) for number in range(20_000)}
    lines = summary_lines(after(running(1), logged(0, values)), now=1042.0)
    assert lines[-2] == f"m{MAX_NAMED_METRICS - 1}: {MAX_NAMED_METRICS - 1}"
    assert lines[-1] == f"… and {20_000 - MAX_NAMED_METRICS:,} more in run.metrics"
