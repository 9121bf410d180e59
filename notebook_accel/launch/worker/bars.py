"""Makes the tqdm bars of a rank report to the notebook, which draws them live in its own view.

User code need not change. The drawing methods of tqdm's own class are replaced in the rank's
process, so that each bar reports, whether its class was imported by ``tqdm``, ``tqdm.auto`` or
``trange``, or is a subclass. ``tqdm.notebook`` draws widgets, for which it needs a kernel, so its
classes are replaced by tqdm's own.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from typing import Any

from tqdm.std import tqdm

from notebook_accel import wire
from notebook_accel.rank import this_rank
from notebook_accel.system.limits import TokenBucket
from notebook_accel.system.modules import change_module

_numbers = itertools.count(1)
# set_postfix draws at every step: more than this of one bar nobody could read.
_REPORTS_PER_SECOND = 20.0
_BURST = 20


def install() -> None:
    """Have every tqdm bar of this rank's process report to the notebook instead of drawing.

    Bars that draw into a file of their own stay as they are.
    """
    plain_display, plain_close, plain_clear = tqdm.display, tqdm.close, tqdm.clear

    def display(bar: Any, msg: str | None = None, pos: int | None = None) -> Any:
        if not _draws_on_output(bar):
            return plain_display(bar, msg, pos)
        _report(bar, closed=False)
        return True

    def clear(bar: Any, nolock: bool = False) -> None:
        if not _draws_on_output(bar):
            plain_clear(bar, nolock)

    def close(bar: Any) -> None:
        if bar.disable or not _draws_on_output(bar):
            plain_close(bar)
            return
        _report(bar, closed=True)
        bar.sp = None  # what draws: without it, closing draws nothing
        with contextlib.suppress(KeyError):
            plain_close(bar)

    for method in (display, clear, close):
        setattr(tqdm, method.__name__, method)
    change_module("tqdm.notebook", _make_plain)


def _draws_on_output(bar: Any) -> bool:
    """Return whether a bar draws on standard output or error; a bar with its own file does not."""
    # tqdm wraps its file to tolerate encodings; the wrapper equals what it wraps.
    stream = getattr(bar, "fp", None)
    return stream is None or stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)


def _report(bar: Any, *, closed: bool) -> None:
    if "_notebook_accel_number" not in vars(bar):
        bar._notebook_accel_number = next(_numbers)
        bar._notebook_accel_limit = TokenBucket(_BURST, _REPORTS_PER_SECOND)
    if not bar._notebook_accel_limit.try_take() and not closed:
        return
    shown: dict[str, Any] = bar.format_dict
    elapsed, done = shown.get("elapsed") or 0.0, shown["n"] - (shown.get("initial") or 0)
    this_rank.current().report(
        wire.Bar,
        bar=bar._notebook_accel_number,
        name=str(shown.get("prefix") or "").rstrip(": "),
        n=_finite(shown["n"]) or 0.0,
        total=_finite(shown.get("total")),
        rate=_finite(shown.get("rate")) or (_finite(done / elapsed) if elapsed else None),
        elapsed=float(elapsed),
        unit=str(shown.get("unit") or "it"),
        postfix=str(shown.get("postfix") or ""),
        closed=closed,
    )


def _finite(value: Any) -> float | None:
    """Return a number as a float; None if it is None, infinite or NaN."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None


def _make_plain(notebook_bars: Any) -> None:
    """Replace the classes in the module ``tqdm.notebook``, which draw ipywidgets, by plain tqdm."""
    notebook_bars.tqdm_notebook = notebook_bars.tqdm = tqdm
    notebook_bars.tnrange = notebook_bars.trange = lambda *args, **kwargs: tqdm(
        range(*args), **kwargs
    )
