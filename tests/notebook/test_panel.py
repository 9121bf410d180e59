from __future__ import annotations

import time

import pytest

from notebook_accel.launch import wire
from notebook_accel.notebook.markup import message_bytes
from notebook_accel.notebook.panel import MAX_BYTES, Details, render_panel
from tests.notebook.states import after, running, succeeded, with_failed
from tests.notebook.test_markup import HOSTILE, Tags

NOW = Details(now=1042.0)


def bar(rank: int, number: int = 1, **fields: object) -> wire.Bar:
    given = {"name": "epoch 1", "n": 50.0, "total": 200.0, "rate": 10.0, **fields}
    return wire.Bar(rank=rank, bar=number, **given)  # type: ignore[arg-type]


def test_a_row_says_how_far_its_rank_is() -> None:
    sample = wire.Sample(rank=0, memory=412_000_000)
    page = Tags(render_panel(after(running(1), bar(0), sample), NOW))
    for words in ("train", "running", "0:42", "epoch 1", "50/200", "10.0 it/s", "0:15", "412 MB"):
        assert words in page.text
    assert ("aria-label", "rank 0: epoch 1: 50/200") in page.attributes
    assert ("value", "0.25") in page.attributes


def test_a_rank_without_a_bar_shows_what_its_loader_counted() -> None:
    sample = wire.Sample(rank=1, batches=250, total_batches=100, pass_start=200, steps=125)
    state = after(running(2), sample)
    page = Tags(render_panel(state, Details(now=1042.0, throughputs={1: 25.0})))
    for words in ("125 steps", "50/100", "25.0 batch/s", "0:02"):
        assert words in page.text


def test_every_one_of_nested_bars_has_a_row() -> None:
    state = after(running(1), bar(0, 1, name="epochs", n=1, total=4), bar(0, 2, name="batches"))
    page = Tags(render_panel(state, NOW))
    assert page.text.index("epochs") < page.text.index("1/4") < page.text.index("batches")
    assert page.tags.count("progress") == 2


def test_the_last_values_of_metrics_with_their_spread() -> None:
    state = after(
        running(2),
        wire.Metric(rank=0, values={"loss": 0.25}),
        wire.Metric(rank=1, values={"loss": 0.5}),
    )
    page = Tags(render_panel(state, Details(now=1042.0, curves={"loss": [3, 2, 1]})))
    assert "loss0.250.25 to 0.5" in page.text
    assert "polyline" in page.tags


def test_nothing_from_a_rank_becomes_markup() -> None:
    state = after(
        running(2, name=HOSTILE),
        bar(1, name=HOSTILE),
        wire.Metric(rank=0, values={HOSTILE: 1.0}),
        wire.Notice(text=HOSTILE),
    )
    page = Tags(render_panel(state, NOW))
    assert not {"script"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("<script>alert('x')</script>") >= 3


@pytest.mark.parametrize("num_ranks", [1, 8, 16, 128])
@pytest.mark.parametrize("line", ["short", "x" * 100_000, "<" * 9999, '"\\\n' * 99, "語" * 999])
def test_it_is_small_whatever_ranks_print(num_ranks: int, line: str) -> None:
    state = running(num_ranks)
    for rank in range(num_ranks):
        state = after(
            state,
            wire.Output(rank=rank, text=f"{line}\n" * 9),
            bar(rank, name=line),
            wire.Metric(rank=rank, values={f"{line}{number}": 0.1 for number in range(12)}),
            wire.Notice(text=f"{line}{rank}"),
        )
    state = with_failed(state, [0], error=f"{line}\n" * 100)
    assert message_bytes(render_panel(state, NOW)) <= MAX_BYTES < 20_000


def test_ranks_beyond_the_rows_are_folded_and_failed_ones_are_not() -> None:
    state = with_failed(running(128), [3, 77, 100])
    page = Tags(render_panel(state, NOW))
    assert page.tags.count("progress") == 8
    assert "… and 120 more: 120 running" in page.text
    assert [name for name, value in page.attributes if value and "rank 77" in value]


def test_the_end_is_drawn_too() -> None:
    page = Tags(render_panel(succeeded(running(2)), Details(now=9999.0)))
    assert "succeeded" in page.text
    assert "0:42" in page.text


def test_drawing_many_ranks_takes_a_fraction_of_the_time_between_two_updates() -> None:
    state = running(128)
    for rank in range(128):
        state = after(state, wire.Output(rank=rank, text="line of output\n" * 200), bar(rank))
    began = time.process_time()
    render_panel(state, NOW)
    assert time.process_time() - began < 0.2
