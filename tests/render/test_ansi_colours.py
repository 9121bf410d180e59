from __future__ import annotations

import re

import pytest

from notebook_accel.render.markup import ansi_to_markup
from tests.render.test_markup import HOSTILE, Tags


def test_colours_become_spans_and_end_where_they_end() -> None:
    made = ansi_to_markup("\x1b[1;31mred & bold\x1b[0m plain \x1b[2mfaint\x1b[22m end")
    assert made == (
        "<span style='color:#cf4f57;font-weight:bold'>red &amp; bold</span> plain "
        "<span style='opacity:.65'>faint</span> end"
    )


def test_text_without_colours_is_only_escaped() -> None:
    assert ansi_to_markup("<b>") == "&lt;b&gt;"


@pytest.mark.parametrize(
    "codes",
    ["31", "97", "90"],
)
def test_every_colour_reads_on_light_and_on_dark(codes: str) -> None:
    (colour,) = re.findall(r"color:#([0-9a-f]{6})", ansi_to_markup(f"\x1b[{codes}mx"))
    red, green, blue = (int(colour[i : i + 2], 16) for i in (0, 2, 4))
    assert 80 < 0.299 * red + 0.587 * green + 0.114 * blue < 160


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[38mx",
        "\x1b[38;5;196mx",
        "\x1b[;;mx",
        "\x1b[999mx",
        "\x1b[" + "9" * 9999 + "mx",
        "\x1b[2Jx",
        "\x1b]0;t\x07x",
        "\x1bx",
    ],
)
def test_what_is_no_colour_leaves_the_text_alone(text: str) -> None:
    assert Tags(ansi_to_markup(text)).text.endswith("x")
    assert "\x1b" not in ansi_to_markup(text)


def test_nothing_becomes_markup() -> None:
    page = Tags(ansi_to_markup(f"\x1b[31m{HOSTILE}\x1b[38;5;1;'><b onclick=x>m"))
    assert set(page.tags) <= {"span"}
    assert {name for name, _ in page.attributes} <= {"style"}
