"""What a rank displays reaches the notebook as data by MIME type."""

from __future__ import annotations

import base64
import io

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from notebook_accel import notebook_launcher
from notebook_accel.launch.worker.displays import figure_png, mime_bundle


class Rich:
    def __repr__(self) -> str:
        return "rich"

    def _repr_html_(self) -> str:
        return "<b>rich</b>"

    def _repr_png_(self) -> bytes:
        return b"png"

    def _repr_svg_(self) -> str:
        raise ValueError("not today")


def test_a_value_becomes_data_by_its_own_methods() -> None:
    assert mime_bundle(Rich()) == {
        "text/plain": "rich",
        "text/html": "<b>rich</b>",
        "image/png": base64.b64encode(b"png").decode(),
    }
    assert set(mime_bundle(Rich)) == {"text/plain"}
    assert mime_bundle(3) == {"text/plain": "3"}


@pytest.mark.parametrize(("labels", "is_opaque"), [("black", True), ("#eeeeee", False)])
def test_a_figure_without_background_is_legible_on_a_dark_page(
    labels: str, is_opaque: bool
) -> None:
    figure = Figure(figsize=(1, 1), facecolor="none")
    figure.subplots().tick_params(labelcolor=labels)
    opacity_at_the_edge = imread(io.BytesIO(figure_png(figure)))[0, 0, 3]
    assert opacity_at_the_edge == is_opaque


def draw() -> None:
    import matplotlib.pyplot as plt
    from IPython.display import HTML, Markdown

    plt.plot([1, 2, 3])
    plt.show()
    from IPython.display import display as of_ipython

    of_ipython(HTML("<i>html</i>"), Markdown("**md**"))
    of_ipython(3)
    display("plain")  # type: ignore[name-defined] # noqa: F821
    of_ipython(HTML("x" * 3_000_000))
    of_ipython({"image/png": b"png", "application/json": {"a": 1}, "text/plain": "x"}, raw=True)


def test_figures_and_rich_values_are_sent_and_text_is_printed() -> None:
    run = notebook_launcher(draw, num_processes=1, view="none")
    figure, html, markdown, raw = run.state.ranks[0].displays
    assert base64.b64decode(figure["image/png"]).startswith(b"\x89PNG")
    assert html["text/html"] == "<i>html</i>"
    assert markdown["text/markdown"] == "**md**"
    assert raw == {"image/png": base64.b64encode(b"png").decode(), "text/plain": "x"}
    log = run.logs(0)
    assert "3\n'plain'\n" in log
    assert "not shown: 3.0 MB, the limit is 2 MB" in log


def flood() -> None:
    from IPython.display import HTML, display

    for number in range(100):
        display(HTML(f"{number}"))


def test_of_a_flood_the_first_ones_are_sent() -> None:
    run = notebook_launcher(flood, num_processes=1, view="none")
    assert 20 <= run.state.ranks[0].num_displays < 30
    assert "this rank displays too much" in run.logs(0)
