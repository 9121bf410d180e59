"""What a run leaves in a saved notebook, converted as people convert it: by nbconvert.

Prices look like mathematics to pages ("$5 or $6"), and an empty line ends HTML in Markdown: what
comes after it, a traceback of the user's, would be read as Markdown.
"""

import re
from dataclasses import replace

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbconvert import HTMLExporter, MarkdownExporter
from nbformat.v4 import new_code_cell, new_notebook, new_output

from notebook_accel import wire
from notebook_accel.render.snapshot import render_line, render_slim, render_snapshot
from tests.notebook.states import after, logged, metrics, running, with_failed

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


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_page_typesets_none_of_it(name):
    """MathJax skips some tags, and what has its classes."""
    page = BeautifulSoup(converted(SNAPSHOTS[name](), HTMLExporter()), "html.parser")
    prices = page.find_all(string=re.compile(r"\$5"))
    assert prices
    for price in prices:
        assert any(
            one.name in _NEVER_READ or {*one.get("class", ())} >= _NO_MATHS for one in price.parents
        )
