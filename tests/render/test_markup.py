import re
from html.parser import HTMLParser

import pytest

from notebook_accel.render.markup import ansi_to_markup, shorten

HOSTILE = "<script>alert('x')</script>\x1b[31m & \"quoted\" \x00\x07\ud800 </pre><b onclick=x>"


class Tags(HTMLParser):
    """The tags and attributes of a page, and its text."""

    def __init__(self, markup):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.text = ""
        self.feed(str(markup))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize(
    ("text", "short"),
    [("abc", "abc"), ("abcd", "abcd"), ("abcde", "abc…"), ("a<b", "…"), ("<", "<"), ("é<", "…")],
)
def test_shorten(text, short):
    assert shorten(text, 4) == short


def test_colours_become_spans_and_end_where_they_end():
    made = ansi_to_markup("\x1b[1;31mred & bold\x1b[0m plain \x1b[2mfaint\x1b[22m end")
    assert made == (
        "<span style='color:#cf4f57;font-weight:bold'>red &amp; bold</span> plain "
        "<span style='opacity:.65'>faint</span> end"
    )
    # On light and on dark pages each colour can be read.
    for code in (31, 90, 97):
        (colour,) = re.findall(r"color:#([0-9a-f]{6})", ansi_to_markup(f"\x1b[{code}mx"))
        red, green, blue = (int(colour[i : i + 2], 16) for i in (0, 2, 4))
        assert 80 < 0.299 * red + 0.587 * green + 0.114 * blue < 160


def test_what_is_no_colour_leaves_the_text_alone_and_nothing_becomes_markup():
    codes = (
        "[38mx",
        "[38;5;196mx",
        "[;;mx",
        "[999mx",
        f"[{'9' * 9999}mx",
        "[2Jx",
        "]0;t\x07x",
        "x",
    )
    for text in (f"\x1b{code}" for code in codes):
        assert Tags(ansi_to_markup(text)).text.endswith("x")
        assert "\x1b" not in ansi_to_markup(text)
    page = Tags(ansi_to_markup(f"\x1b[31m{HOSTILE}\x1b[38;5;1;'><b onclick=x>m"))
    assert set(page.tags) <= {"span"}
    assert {name for name, _ in page.attributes} <= {"style"}
