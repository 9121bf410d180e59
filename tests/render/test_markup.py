from __future__ import annotations

from html.parser import HTMLParser

import pytest

from notebook_accel.render.markup import Markup, element, escape, join, message_bytes, shorten

HOSTILE = "<script>alert('x')</script>\x1b[31m & \"quoted\" \x00\x07\ud800 </pre><b onclick=x>"


class Tags(HTMLParser):
    """The tags and attributes of a page, and its text."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(str(markup))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_stays_text_and_attributes_stay_attributes() -> None:
    page = Tags(element("p", HOSTILE, title=HOSTILE))
    assert page.tags == ["p"]
    assert [name for name, _ in page.attributes] == ["title"]
    assert page.text == "<script>alert('x')</script> & \"quoted\"  </pre><b onclick=x>"


def test_what_is_markup_already_is_not_escaped_again() -> None:
    assert element("b", element("i", "a&b")) == "<b><i>a&amp;b</i></b>"
    assert join(["<", Markup("<br>")]) == "&lt;<br>"
    assert escape(escape("<")) == "&lt;"


def test_attributes_have_their_html_names() -> None:
    made = element("progress", aria_label="rank 0", class_="a", hidden=False, open=True, id=None)
    assert made == "<progress aria-label='rank 0' class='a' open></progress>"
    assert element("img", src="x") == "<img src='x'>"


@pytest.mark.parametrize(
    ("text", "short"),
    [("abc", "abc"), ("abcd", "abcd"), ("abcde", "abc…"), ("a<b", "…"), ("<", "<"), ("é<", "…")],
)
def test_shorten(text: str, short: str) -> None:
    assert shorten(text, 4) == short


def test_message_bytes_counts_bytes_and_what_json_escapes() -> None:
    assert message_bytes('ä\n"') == 3 + 1 + 2
