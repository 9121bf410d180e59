"""The widgets of the log, without a page: what each message would say."""

import re
import time

import ipywidgets
import pytest
from markupsafe import Markup

from notebook_accel import wire
from notebook_accel.notebook.live_panel import PanelWidgets
from notebook_accel.notebook.log_view import LogView, LogWindow
from notebook_accel.render.markup import message_bytes
from tests.notebook.states import after, running
from tests.notebook.widgets import classes, field, part
from tests.render.test_markup import HOSTILE, Tags


def output(rank, text):
    # All at one time: each second has lines of its own.
    return wire.Output(rank=rank, text=text, wall=1000.0)


def view_of(state):
    saved = lambda rank: Markup(f"<a>{'all' if rank is None else rank}</a>")  # noqa: E731
    return LogView(state, PanelWidgets(), saved=saved)


def blocks(view):
    """The widgets of the blocks, as the page lays them out."""
    shown = [widget for widget in part(view.box, "na-blocks").children if widget.value]
    return sorted(shown, key=lambda widget: int(re.findall(r"order:(\d+)", widget.value)[0]))


def text(view):
    return "\n".join(Tags(widget.value).text for widget in blocks(view))


def draw_all(view, state):
    while view.draw(state):
        pass


def test_lines_that_keep_coming_take_one_message_a_draw_and_older_ones_get_there(monkeypatch):
    state = running(1)
    view = view_of(state)
    sent = []
    monkeypatch.setattr(ipywidgets.Widget, "send_state", lambda *args, **_: sent.append(args))
    for number in range(150):
        lines = "".join(f"line {n}\n" for n in range(40 * number, 40 * number + 40))
        state = after(state, output(0, lines))
        view.read(state)
        view.draw(state)
        if number == 115:
            # All widgets were made.
            sent.clear()
    assert len(sent) == 34
    numbers = [int(line) for line in re.findall(r"line (\d+)", text(view))]
    missing = set(range(numbers[0], 6000)) - set(numbers)
    assert len(missing) <= 200
    assert len(numbers) > 1500
    # In the end all are there, in order, in widgets that were used again.
    draw_all(view, state)
    numbers = [int(line.split()[1]) for line in text(view).splitlines()]
    assert numbers == list(range(numbers[0], 6000))
    assert len(numbers) >= 2000
    assert len(part(view.box, "na-blocks").children) <= 40


def test_a_search_shows_the_lines_with_these_words_alone_and_says_how_many_also_of_new_ones():
    state = after(running(2), output(0, "a loss\nb\n"), output(1, "\x1b[32mLo\x1b[0mss\nc\n"))
    view = view_of(state)
    title = part(view.box, "na-log-title")

    def shown(*messages):
        nonlocal state
        state = after(state, *messages)
        view.read(state)
        draw_all(view, state)
        return text(view), title.value, "na-optional" in classes(title)

    assert shown() == ("0a loss\nb1Loss\nc", "output", True)
    field(view.box, "Search the output").value = "needle"
    assert shown() == ("", "nothing found", False)
    field(view.box, "Search the output").value = " LOSS "
    assert shown() == ("0a loss1Loss", "2 hits", False)
    assert shown(output(1, "no\nmore lo")) == ("0a loss1Loss", "2 hits", False)
    assert shown(output(1, "ss\n")) == ("0a loss1Loss\nmore loss", "3 hits", False)
    field(view.box, "Output of").value = 0
    assert shown() == ("a loss", "1 hit", False)
    field(view.box, "Search the output").value = ""
    assert shown() == ("a loss\nb", "output", True)


# ---- the lines, without widgets


def send_all(window):
    """The HTML of every block that the page lacks, by number."""
    sent = {}
    while (block := window.next_block()) is not None:
        sent[block.number] = str(window.render(block))
    return sent


def test_each_line_has_the_time_at_which_it_came_also_where_one_searches_later():
    def came(text, wall):
        return wire.Output(rank=0, text=text, wall=wall)

    clock = lambda wall: time.strftime("%H:%M:%S", time.localtime(wall))  # noqa: E731
    parts = [came("one\ntw", 1000.2), came("o\nthree\n", 1000.9), came("four\nfi", 1002.1)]
    state = after(running(1), *parts, came("ve\n", 1005.0))
    for words, expected in (
        ("", [(1000, "one\ntwo\nthree"), (1002, "four\nfive")]),
        ("o", [(1000, "one\ntwo"), (1002, "four")]),
    ):
        window = LogWindow([0], words)
        window.read(state)
        (html,) = send_all(window).values()
        found = re.findall("data-time='(.*?)'.*?<pre>(.*?)</pre>", html, flags=re.DOTALL)
        assert found == [(clock(second), lines) for second, lines in expected]


def test_a_line_without_an_end_is_shown_below_the_others_until_it_has_one():
    window = LogWindow([0, 1])
    state = after(running(2), output(0, "half"), output(1, "whole\n"))
    window.read(state)
    assert Tags(send_all(window)[0]).text == "1whole0half"
    window.read(after(state, output(0, " and half\n")))
    assert Tags(send_all(window)[0]).text == "1whole0half and half"


def test_in_a_flood_the_newest_lines_come_first_and_a_gap_is_marked_until_it_is_filled():
    window = LogWindow([0])
    state = after(running(1), output(0, "x\n" * 100))
    window.read(state)
    assert window.next_block() is not None
    window.read(after(state, output(0, "y\n" * 250)))
    newest = window.next_block()
    assert newest.number == 3
    assert "…" in window.render(newest)
    rest = send_all(window)
    assert list(rest) == [2, 3, 1]
    assert not [number for number in (1, 3) if "…" in rest[number]]
    assert "…" not in window.render(newest)


@pytest.mark.parametrize(
    "line",
    [HOSTILE, "x" * 1_000_000, "<" * 9999, '"\\' * 999, "語" * 5000, "\x1b[31mx\x1b[0m" * 900],
)
def test_a_block_fits_into_a_message_whatever_ranks_print(line):
    window = LogWindow([0, 1])
    state = running(2)
    for _ in range(30):
        state = after(state, output(0, line + "\n"), output(1, line + "\n"))
        window.read(state)
    blocks = send_all(window)
    assert max(map(message_bytes, blocks.values())) < 20_000
    page = Tags("".join(blocks.values()))
    assert set(page.tags) <= {"div", "pre", "span"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
