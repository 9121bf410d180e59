from __future__ import annotations

import re
import time

import pytest

from notebook_accel import wire
from notebook_accel.notebook.log_view import LogWindow
from notebook_accel.render.markup import message_bytes
from tests.notebook.states import after, running
from tests.render.test_markup import HOSTILE, Tags


def output(rank: int, text: str, skipped: int = 0) -> wire.Output:
    # All at one time: each second has lines of its own.
    return wire.Output(rank=rank, text=text, skipped=skipped, wall=1000.0)


def send_all(window: LogWindow) -> dict[int, str]:
    """The HTML of every block that the page lacks, by number."""
    sent = {}
    while (block := window.next_block()) is not None:
        sent[block.number] = str(window.render(block))
    return sent


def test_a_page_is_sent_only_what_it_lacks() -> None:
    window = LogWindow([0])
    state = after(running(1), output(0, "".join(f"line {n}\n" for n in range(150))))
    window.read(state)
    first = send_all(window)
    assert list(first) == [1, 0]
    assert "line 99" in first[0]
    window.read(state)
    assert send_all(window) == {}
    window.read(after(state, output(0, "one more\n")))
    second = send_all(window)
    assert list(second) == [1]
    assert "one more" in second[1]


def test_each_line_has_the_time_at_which_it_came_also_where_one_searches_later() -> None:
    def came(text: str, wall: float) -> wire.Output:
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


def test_a_line_without_an_end_is_shown_below_the_others_until_it_has_one() -> None:
    window = LogWindow([0, 1])
    state = after(running(2), output(0, "half"), output(1, "whole\n"))
    window.read(state)
    assert Tags(send_all(window)[0]).text == "1whole0half"
    window.read(after(state, output(0, " and half\n")))
    assert Tags(send_all(window)[0]).text == "1whole0half and half"


def test_in_a_flood_the_newest_lines_come_first_and_a_gap_is_marked_until_it_is_filled() -> None:
    window = LogWindow([0])
    state = after(running(1), output(0, "x\n" * 100))
    window.read(state)
    assert window.next_block() is not None
    window.read(after(state, output(0, "y\n" * 250)))
    newest = window.next_block()
    assert newest is not None
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
def test_a_block_fits_into_a_message_whatever_ranks_print(line: str) -> None:
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
