"""Output as a terminal would show it, however it is cut into pieces."""

import random

import pytest

from notebook_accel.launch.text.terminal_text import (
    GAP,
    MAX_LINE,
    Tail,
    append_output,
    as_shown,
    one_line,
    plain_text,
)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[1;38;5;200mbold\x1b[K\x1b[2A", "bold"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ and \x1b]0;t\x07more", "link and more"),
        ("\x1b]8;;http://x\x07link\x1b]8;;\x07", "link"),
        ("\x1b(Bplain", "plain"),
        ("nothing [31m here", "nothing [31m here"),
        ("an end \x1b", "an end "),
        ("\x9b31mred\x9d0;title\x9c in eight bits", "red in eight bits"),
        ("nul\x00, bell\x07, del\x7f", "nul, bell, del"),
        ("\u202ebackwards\u202c and \u2066isolated\u2069", "backwards and isolated"),
        ("half a pair \ud800, no character \uffff", "half a pair , no character "),
        ("tabs\tand\nlines stay", "tabs\tand\nlines stay"),
    ],
)
def test_what_a_terminal_would_obey_is_left_out(text, plain):
    assert plain_text(text) == plain


def test_titles_without_an_end_take_no_time_that_grows_by_their_square():
    assert plain_text("\x9d" * 1_000_000 + "text") == "text"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("loss", "loss"),
        ("a\nFAKE: 99", "a FAKE: 99"),
        ("a\r\n\tb\u2028c\x85d", "a b c d"),
        ("\x1b[31mloss\x1b[0m", "loss"),
        ("x" * 12, "x" * 9 + "…"),
        ("\x1b[0m" * 100_000 + "end", "…"),
    ],
)
def test_a_name_becomes_one_line(text, line):
    assert one_line(text, 10) == line


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain", "plain"),
        ("10%\r20%\r30%", "30%"),
        ("\r10%\r20%", "20%"),
        ("10%\r", "10%"),
        ("\r\r", ""),
        ("", ""),
    ],
)
def test_what_is_left_of_a_line(line, shown):
    assert as_shown(line) == shown


def fold(pieces, limit=100):
    tail = Tail()
    for piece in pieces:
        tail = append_output(tail, piece, limit=limit)
    return tail


TEXTS = [
    "one\ntwo\nthree",
    "one\ntwo\nthree\n",
    "\n\nempty\n\n",
    "10%\r20%\r30%\ndone\n",
    "10%\r20%\r",
    "\r10%\r20%\nnext",
    "windows\r\nlines\r\n",
    "\n",
    "a",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_show_what_the_whole_shows(text):
    whole = fold([text])
    assert list(whole.lines) == [as_shown(line) for line in text.removesuffix("\n").split("\n")]
    assert whole.is_open == (not text.endswith("\n"))
    draw = random.Random(0)
    for _ in range(50):
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert fold(pieces) == whole, pieces


def test_a_line_that_is_rewritten_piece_by_piece():
    """``print(n, end="\\r")``, as most home-made progress does it."""
    tail = fold([f"{n}%\r" for n in range(100)])
    assert tail == Tail(("99%",), is_open=True, is_rewound=True)
    assert append_output(tail, "\n", limit=100) == Tail(("99%",))
    assert append_output(tail, "done\n", limit=100) == Tail(("done",))


def test_of_a_line_that_grows_for_ever_the_begin_stays_and_the_end_moves():
    whole = "epoch 1 " + "." * 10_000 + " done"
    for size in (1, 100, 5_000, len(whole)):
        pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
        (line,) = fold(pieces).lines
        begin, _, end = line.partition(GAP)
        assert begin.startswith("epoch 1 ...")
        assert end.endswith("... done")
        assert GAP not in end
        assert len(line) <= MAX_LINE


def test_nothing_changes_nothing():
    tail = Tail(("a", "b"), is_open=True)
    assert append_output(tail, "", limit=5) is tail
