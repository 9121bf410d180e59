"""What a rank displays (figures, tables, HTML, Markdown, images) is sent to the notebook.

In a notebook ``display(x)`` and ``plt.show()`` draw below the cell; a rank has no cell, and IPython
would print a ``repr`` there. So the functions of that name are replaced in the modules that have
them, right after their import; nothing is imported here. Values are turned into data by MIME type
by the methods that Jupyter knows (``_repr_html_`` and the like), and text alone is printed.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import io
import sys
from typing import TYPE_CHECKING, Any

from notebook_accel.launch import rank, wire
from notebook_accel.launch.system.token_bucket import TokenBucket
from notebook_accel.launch.worker.after_import import change_module

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["figure_png", "format_by", "install", "mime_bundle"]

# A page with more of it stands still, and a notebook keeps it for good.
_MAX_BYTES = 2_000_000
# Figures in a loop: that many at once, and then one every two seconds.
_BURST = 20
_PER_SECOND = 0.5

_METHODS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_latex_", "text/latex"),
)


_format: Callable[[Any], dict[str, Any]] | None = None


def format_by(function: Callable[[Any], dict[str, Any]]) -> None:
    """Turn values into data by ``function``: the shell of a session knows what was registered."""
    global _format
    _format = function


def install() -> None:
    """Have ``display`` and ``plt.show`` of this process send what they are given."""
    display = _make_display()
    vars(builtins).update(display=display)

    def show(*_args: object, **_options: object) -> None:
        pyplot: Any = sys.modules["matplotlib.pyplot"]
        for number in pyplot.get_fignums():
            display(pyplot.figure(number))
        pyplot.close("all")

    def replace_display(module: Any) -> None:
        module.display = display

    def replace_show(module: Any) -> None:
        module.show = show

    for name, change in (
        ("IPython.core.display_functions", replace_display),
        # The module that has it in IPython 7.
        ("IPython.core.display", replace_display),
        ("matplotlib.pyplot", replace_show),
    ):
        change_module(name, change)


def _make_display() -> Callable[..., None]:
    bucket = TokenBucket(_BURST, _PER_SECOND)

    def display(*values: Any, raw: bool = False, **_options: object) -> None:
        for value in values:
            data = _sendable(value) if raw else mime_bundle(value)
            if not data:
                continue
            text = str(data.get("text/plain", ""))
            size = sum(map(len, data.values()))
            context = rank.current()
            if set(data) == {"text/plain"} or not isinstance(context, rank.LaunchedContext):
                sys.stdout.write(f"{text}\n")
            elif size > _MAX_BYTES:
                megabytes, limit = size / 1e6, _MAX_BYTES / 1e6
                sys.stdout.write(
                    f"{text} (not shown: {megabytes:.1f} MB, the limit is {limit:.0f} MB)\n"
                )
            elif not bucket.try_take():
                sys.stdout.write(f"{text} (not shown: this rank displays too much)\n")
            else:
                context.report(wire.Displayed, data=data)

    return display


def mime_bundle(value: Any) -> dict[str, str]:
    """``value`` as data by MIME type, as Jupyter would show it; binary data in base64.

    It is empty where the value has displayed itself.
    """
    return _sendable(_format(value) if _format is not None else _found_by_methods(value))


def _sendable(found: Mapping[str, Any]) -> dict[str, str]:
    """The part of the data that is text or bytes, as ``wire.Displayed`` has it."""
    texts = {str(mime): _as_text(data) for mime, data in found.items()}
    return {mime: text for mime, text in texts.items() if text}


def _found_by_methods(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"text/plain": repr(value)}
    # A class has the methods too, but they are for its instances.
    if not isinstance(value, type):
        for method, mime in _METHODS:
            # The object's own method may raise anything: then one of the others shows it.
            with contextlib.suppress(Exception):
                found[mime] = getattr(value, method)()
        with contextlib.suppress(Exception):
            bundle = value._repr_mimebundle_(include=None, exclude=None)
            found.update(bundle[0] if isinstance(bundle, tuple) else bundle)
    if type(value).__module__ == "matplotlib.figure" and "image/png" not in found:
        found["image/png"] = figure_png(value)
    return found


def figure_png(figure: Any) -> bytes:
    """A figure of Matplotlib as PNG; on white where it has no background but dark labels.

    So it can be read on a dark page. In an ordinary cell such a figure comes with a word to the
    page, which puts white below it (matplotlib_inline's ``_fetch_figure_metadata``).
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight", facecolor=_background(figure))
    return buffer.getvalue()


def _background(figure: Any) -> Any:
    from matplotlib.colors import to_rgba

    own = figure.get_facecolor()
    labels = [
        to_rgba(label.get_color())
        for axes in figure.axes
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels())
    ]
    # The brightness is that of ITU-R BT.601.
    are_dark = all(
        0.299 * red + 0.587 * green + 0.114 * blue <= 0.5 for red, green, blue, _ in labels
    )
    return "white" if to_rgba(own)[3] < 0.5 and labels and are_dark else own


def _as_text(data: object) -> str:
    """Text as it is, bytes in base64; "" for what is neither, such as a bundle's metadata."""
    if isinstance(data, tuple):
        data = data[0]
    if isinstance(data, bytes):
        return base64.b64encode(data).decode()
    return data if isinstance(data, str) else ""
