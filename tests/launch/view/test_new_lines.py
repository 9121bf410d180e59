from __future__ import annotations

from notebook_accel import wire
from notebook_accel.launch.view.plain import LineReader, NewLines
from tests.notebook.states import after, running


def test_each_line_is_read_once_and_an_open_one_at_the_end() -> None:
    reader = LineReader()
    state = after(running(1), wire.Output(rank=0, text="a\nb\nhalf"))
    assert reader.read(state.ranks[0]) == NewLines(("a", "b"))
    assert reader.read(state.ranks[0]) == NewLines()
    state = after(state, wire.Output(rank=0, text=" and half\nlast"))
    assert reader.read(state.ranks[0]) == NewLines(("half and half",))
    assert reader.read(state.ranks[0], last=True) == NewLines(("last",))
    assert reader.read(state.ranks[0], last=True) == NewLines()


def test_lines_that_only_the_file_has_are_counted() -> None:
    reader = LineReader()
    state = after(running(1), wire.Output(rank=0, text="a\n"))
    reader.read(state.ranks[0])
    state = after(state, wire.Output(rank=0, text="x\ny\n", skipped=1000))
    assert reader.read(state.ranks[0]) == NewLines(("x", "y"), 1000)


def test_a_rank_that_was_started_again_is_read_from_its_first_line_on() -> None:
    reader = LineReader()
    first = after(running(1), wire.Output(rank=0, text="a\nb\nc\n"))
    reader.read(first.ranks[0])
    again = after(running(1), wire.Output(rank=0, text="d\ne\n"))
    assert reader.has_news(again.ranks[0])
    assert reader.read(again.ranks[0]) == NewLines(("d", "e"))
    assert not reader.has_news(again.ranks[0])
