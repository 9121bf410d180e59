"""What a run leaves in a saved notebook, converted as people convert it: by nbconvert.

Prices look like mathematics to pages ("$5 or $6"), and an empty line ends HTML in Markdown: what
comes after it, a traceback of the user's, would be read as Markdown.
"""

from dataclasses import replace
from html.parser import HTMLParser

import nbformat
import pytest
from nbconvert import HTMLExporter, MarkdownExporter
from nbconvert.preprocessors.sanitize import SanitizeHTML
from nbformat.v4 import new_code_cell, new_notebook, new_output

from notebook_accel import wire
from notebook_accel.render.snapshot import render_line, render_slim, render_snapshot
from tests.notebook.states import after, html_of, logged, metrics, running, with_failed
from tests.render.test_markup import Tags

# What GitHub keeps of HTML: html-pipeline's list, as far as it matters here. Of images it keeps
# those alone that lie on a server.
GITHUB_TAGS = """
    a b blockquote br code del details div em h1 h2 h3 h4 h5 h6 hr i img ins kbd li ol p pre q s
    samp small span strong sub summary sup table tbody td tfoot th thead tr tt ul var
""".split()  # noqa: SIM905 (a list of names is read more easily so)
GITHUB_ATTRIBUTES = {
    "*": ["alt", "aria-label", "colspan", "height", "open", "role", "rowspan", "title", "width"],
    "a": ["href"],
    "img": ["src"],
}
# Mathematics, an empty line, Markdown and HTML that must stay text.
NASTY = "$5 or $6\n\n\n# {0} <i>&amp;</i> \\(x\\) _a_ `b`\n\n    $$y$$"
_NEVER_READ = {"script", "style", "textarea", "pre", "code"}
_NO_MATHS = {"tex2jax_ignore", "mathjax_ignore"}


def nasty(place):
    return NASTY.format(f"end of {place}")


def failed():
    """Nasty text in each place that has text of the user's."""
    state = after(
        running(2, name=nasty("name")),
        wire.Output(rank=0, text=nasty("output") + "\n"),
        wire.Output(rank=1, text="x\n\n" * 40 + nasty("long output") + "\n"),
        wire.Notice(text=nasty("notice")),
        logged(0, {nasty("metric"): 1.0}),
        wire.Bar(rank=0, bar=0, name=nasty("bar"), n=1, total=3, unit=nasty("unit")),
    )
    error = f"rank 1 failed: ValueError: {nasty('headline')}\n\n{nasty('traceback')}"
    return render_snapshot(with_failed(state, [1], error=error), metrics([nasty("curve")]))


def of_a_cell():
    state = after(running(1, name="In[3]"), wire.Output(rank=0, text=nasty("output") + "\n"))
    return render_slim(replace(state, notices=(nasty("notice"),)))


SNAPSHOTS = {"summary": failed, "cell": of_a_cell, "line": lambda: render_line(nasty("line"))}


def notebook_of(snapshot):
    output = new_output("display_data", data=snapshot)
    notebook = new_notebook(cells=[new_code_cell("run()", outputs=[output])])
    nbformat.validate(notebook)
    return notebook


def converted(snapshot, exporter):
    return exporter.from_notebook_node(notebook_of(snapshot))[0]


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_in_markdown_it_is_one_block_of_html(name):
    text = converted(SNAPSHOTS[name](), MarkdownExporter())
    # What GitHub and others do: HTML begins with a line that begins with <div, and goes on until
    # an empty line.
    blocks = text.split("\n\n")
    (block,) = (block for block in blocks if "$5" in block)
    assert block.lstrip("\n").startswith("<div")
    assert block.rstrip().endswith("</div>")
    for other in blocks:
        assert other is block or "end of" not in other


def test_what_github_keeps_of_a_summary_says_it_all():
    state = after(
        running(2),
        wire.Output(rank=0, text="\x1b[31ma red line\x1b[0m\n"),
        wire.Output(rank=1, text="x\n" * 40 + "the last of many\n"),
        wire.Notice(text="a word for you"),
        wire.Bar(rank=0, bar=0, name="epochs", n=1, total=3),
    )
    error = "rank 1 failed: ValueError: bad\n\nCell In[3], line 7"
    curves = metrics([f"metric-{number}" for number in range(9)])
    snapshot = render_snapshot(with_failed(state, [1], error=error), curves)
    # What it does not keep it would show as text here, tags and all.
    sanitiser = SanitizeHTML(tags=GITHUB_TAGS, attributes=GITHUB_ATTRIBUTES, styles=[])
    kept = sanitiser.preprocess(notebook_of(snapshot), {})[0].cells[0].outputs[0].data["text/html"]
    page = Tags(kept)
    assert sorted(page.tags) == sorted(Tags(html_of(snapshot)).tags)
    assert {name for name, _ in page.attributes} <= {"alt", "height", "title", "width"}
    for words in (
        "✗ failed",
        "epochs: 1/3",
        "a red line",
        "41 lines of output",
        "the last of many",
        "a word for you",
        "ValueError: bad",
        "Cell In[3], line 7",
        "metric-8",
    ):
        assert words in page.text
    assert "<" not in page.text
    # In the place of each chart stands what it shows.
    alts = [value for name, value in page.attributes if name == "alt" and value]
    assert alts == [f"metric-{number}: 1 → 0.03688 at step 99" for number in range(6)]


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_page_typesets_none_of_it(name):
    page = Page()
    page.feed(converted(SNAPSHOTS[name](), HTMLExporter()))
    assert page.prices
    assert page.typeset == []


class Page(HTMLParser):
    """Finds text that MathJax would read: it skips some tags, and what has one of its classes."""

    def __init__(self):
        super().__init__()
        self.prices = 0
        self.typeset = []
        self._open = []

    def handle_starttag(self, tag, attrs):
        if tag not in {"br", "img", "meta", "link", "col", "input", "hr"}:
            classes = set((dict(attrs).get("class") or "").split())
            self._open.append(tag in _NEVER_READ or classes >= _NO_MATHS)

    def handle_endtag(self, tag):
        if self._open:
            self._open.pop()

    def handle_data(self, data):
        if "$5" in data:
            self.prices += 1
            if not any(self._open):
                self.typeset.append(data)
