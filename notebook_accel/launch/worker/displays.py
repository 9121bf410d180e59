"""Sends what a rank displays (figures, tables, HTML, Markdown, images) to the notebook.

In a notebook ``display(x)`` and ``plt.show()`` draw below the cell. A rank has no cell, and IPython
would only print the ``repr`` of ``x``. So these functions are replaced in IPython and Matplotlib,
right after the import of each. IPython's formatters turn a value into data by MIME type (an HTML
text, a PNG image); IPython is imported only once something is displayed. A display that is nothing
but text is printed, unless it has a ``display_id``, by which it can be replaced later.
``clear_output`` clears what the rank has displayed in this call, and no printed lines.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import io
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any
from uuid import uuid4

from notebook_accel import wire
from notebook_accel.rank import this_rank
from notebook_accel.system.limits import TokenBucket
from notebook_accel.system.modules import change_module

# The most bytes of one display: with more a page freezes, and the notebook's file keeps them.
_MAX_BYTES = 2_000_000
# Figures in a loop: that many at once, and then one every two seconds.
_BURST = 20
_PER_SECOND = 0.5
# What is replaced in a loop: so often at most, and `_MAX_BYTES` a second.
_REPLACE_SECONDS = 0.2

# Whether displays are dropped (muted).
_is_muted = False
# IPython's formatters, which know what each value is as data.
_formatter: Any = None


def format_by(formatter: Any) -> None:
    """Use this IPython ``DisplayFormatter`` for all displays of the rank.

    Called with the formatter of the rank's IPython shell if it has one (in a session), because the
    user may have extended that formatter.
    """
    global _formatter
    figures = formatter.formatters["image/png"]
    figures.for_type_by_name("matplotlib.figure", "Figure", figure_png)
    _formatter = formatter


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Drop all displays of the block, which the notebook has shown itself."""
    global _is_muted
    _is_muted = True
    try:
        yield
    finally:
        _is_muted = False


def install() -> None:
    """Replace ``display``, ``clear_output`` and ``plt.show``: they send to the notebook."""
    vars(builtins).update(display=display)

    def show(*_args: object, **_options: object) -> None:
        pyplot: Any = sys.modules["matplotlib.pyplot"]
        for number in pyplot.get_fignums():
            display(pyplot.figure(number))
        pyplot.close("all")

    of_ipython = {"display": display, "clear_output": clear_output}
    # The second module has it in IPython 7.
    for name in ("IPython.core.display_functions", "IPython.core.display"):
        change_module(name, lambda module: vars(module).update(of_ipython))
    change_module("matplotlib.pyplot", lambda module: vars(module).update(show=show))


def display(
    *values: Any,
    raw: bool = False,
    display_id: str | bool | None = None,
    update: bool = False,
    **_options: object,
) -> Any:
    """Send values to the notebook, in place of IPython's ``display``.

    Returns:
        IPython's ``DisplayHandle`` if there is a ``display_id``, else None.

    Raises:
        TypeError: ``update`` without a ``display_id``.
    """
    if update and not display_id:
        raise TypeError("display_id required for update_display")
    if _is_muted:
        return None
    name = uuid4().hex if display_id is True else str(display_id or "")
    if name and not values:
        # A place for what comes later.
        values, raw = ({},), True
    for value in values:
        data = sendable(value) if raw else mime_bundle(value)
        is_place = raw and name
        if data or is_place:
            _outbox.send(data, name, is_update=update)
    return import_module("IPython.display").DisplayHandle(name) if name else None


def clear_output(wait: bool = False) -> None:
    """Clear what this rank has displayed in this call, in place of IPython's ``clear_output``."""
    if not _is_muted:
        _outbox.clear(wait=wait)


class _Outbox:
    """Sends this rank's displays to the notebook; limits their size and their number per second.

    The notebook's file keeps each display, and too many would freeze its page. Each rank process
    has one outbox.
    """

    def __init__(self) -> None:
        self._bucket = TokenBucket(_BURST, _PER_SECOND)
        # The ids of what was sent, which alone can be replaced.
        self._sent: set[str] = set()
        # What takes the place of something once it is its turn, with its id: of all that was
        # displayed if ``_clears``, else of what has the id.
        self._waiting: list[tuple[dict[str, str], str]] = []
        self._clears = False
        self._turn = 0.0
        # Whether the next display begins anew (``clear_output(wait=True)``).
        self._clears_next = False
        # Whether there is anything to clear: what earlier calls displayed stays.
        self._has_shown = False
        # Reentrant: a signal handler of the user's may display something as well.
        self._lock = threading.RLock()

    def send(self, data: dict[str, str], display_id: str, *, is_update: bool) -> None:
        """Send one display to the notebook, or print its text instead.

        It is printed if it is text without a ``display_id``, too large, above the rate limit, or
        from a child process.

        Args:
            display_id: id by which it can be replaced later; "" if it cannot.
        """
        text, why = str(data.get("text/plain", "")), ""
        size = _size(data)
        context = this_rank.current()
        is_printed = set(data) == {"text/plain"} and not display_id
        if is_printed or not isinstance(context, this_rank.LaunchedContext):
            sys.stdout.write(f"{text}\n")
        elif not context.is_own_process:  # a child that was forked: it does not speak for the rank
            why = "a child process of the rank displayed it"
        elif size > _MAX_BYTES:
            why = f"{size / 1e6:.1f} MB, the limit is {_MAX_BYTES / 1e6:.0f} MB"
        elif self._waits(data, display_id, is_update=is_update):
            # Before its turn it waits for the next that waits, or for the end of the call.
            if time.monotonic() >= self._turn:
                self.send_waiting()
        elif not self._bucket.try_take():
            why = "this rank displays too much"
        else:
            # Another thread may be sending what waited for this id: this is newer, and comes after.
            with self._lock:
                self._waiting = [one for one in self._waiting if one[1] != display_id]
                self._report(data, display_id)
        if why:
            sys.stdout.write(f"{text} (not shown: {why})\n")

    def _waits(self, data: dict[str, str], display_id: str, *, is_update: bool) -> bool:
        """Keep what takes the place of something until its turn; return whether this does."""
        with self._lock:
            if self._clears_next:
                self._clears_next, self._clears, self._waiting = False, True, []
            if not self._clears and not (is_update and display_id in self._sent):
                return False
            others = (one for one in self._waiting if not is_update or one[1] != display_id)
            self._waiting = [*others, (data, display_id)]
            if self._clears:
                del self._waiting[:-_BURST]
            return True

    def _report(self, data: dict[str, str], display_id: str, **how: bool) -> None:
        self._sent.add(display_id)
        self._has_shown = True
        this_rank.current().report(wire.Displayed, data=data, display_id=display_id, **how)

    def clear(self, *, wait: bool) -> None:
        context = this_rank.current()
        if not isinstance(context, this_rank.LaunchedContext) or not context.is_own_process:
            return
        with self._lock:
            self._clears_next = self._has_shown or (self._clears and bool(self._waiting))
            if self._clears_next and not wait:
                self._has_shown, self._clears, self._waiting = False, True, []
                context.report(wire.Displayed, data={}, clears=True)

    def end_call(self) -> None:
        self.send_waiting()
        self._clears_next = self._has_shown = False

    def send_waiting(self) -> None:
        """Send the displays that wait because earlier ones were replaced a moment ago.

        Of several updates of one display, only the newest is sent.
        """
        context = this_rank.current()
        if not isinstance(context, this_rank.LaunchedContext) or not context.is_own_process:
            return
        with self._lock:
            waiting, self._waiting = self._waiting, []
            clears, self._clears = self._clears, False
            if waiting:
                size = sum(_size(data) for data, _ in waiting)
                self._turn = time.monotonic() + max(_REPLACE_SECONDS, size / _MAX_BYTES)
                if clears:
                    # These take the place of others: what is in sight does not grow.
                    self._bucket = TokenBucket(_BURST, _PER_SECOND)
            for index, (data, display_id) in enumerate(waiting):
                how = {"clears": index == 0} if clears else {"replaces": True}
                self._report(data, display_id, **how)


_outbox = _Outbox()


def flush() -> None:
    """Send the displays that still wait; called when the rank's call ends."""
    _outbox.end_call()


def _size(data: Mapping[str, str]) -> int:
    return sum(map(len, data.values()))


def mime_bundle(value: Any) -> dict[str, str]:
    """Return a value as data by MIME type, as Jupyter would show it; binary data in base64.

    Empty if the value has displayed itself (``_ipython_display_``), or if its ``repr`` raises.
    """
    if _formatter is None:
        format_by(import_module("IPython.core.formatters").DisplayFormatter())
    return sendable(_formatter.format(value)[0])


def sendable(found: Mapping[str, Any]) -> dict[str, str]:
    """Return data by MIME type with each entry as text: bytes in base64, other types left out."""
    texts: dict[str, str] = {}
    for mime, data in found.items():
        text = base64.b64encode(data).decode() if isinstance(data, bytes) else data
        if isinstance(text, str) and text:
            texts[str(mime)] = text
    return texts


def figure_png(figure: Any) -> bytes:
    """Return a Matplotlib figure as the bytes of a PNG image."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()
