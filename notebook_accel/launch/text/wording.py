"""Formats numbers, durations, ranks and arguments for people to read."""

from __future__ import annotations

import math
import re
import reprlib
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from itertools import islice, pairwise
from numbers import Number
from pathlib import PurePath
from types import FunctionType, SimpleNamespace
from typing import Any

# Below an error of a kernel on a device, by which the launcher knows it too.
LASTING_ERROR = (
    "This error stays: the device refuses all work of this rank's process from now on, which has "
    "to be replaced by a new one. Kernels run behind the host, so the line shown may not be the "
    'one at fault; to find it, run again with env={"CUDA_LAUNCH_BLOCKING": "1"}.'
)
# A count above it, and one that is not finite, is written as a measured value is.
_MAX_WRITTEN_OUT = 1e15


def clock(seconds: float) -> str:
    """Return a duration as a clock shows it: ``0:42``, ``1:02:33``."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def span(seconds: float) -> str:
    """Return a duration as text: ``3.2 s``, or ``1:02`` from a minute on."""
    return f"{max(0.0, seconds):.1f} s" if seconds < 60 else clock(seconds)


def count(value: float) -> str:
    """Return a count as text: ``1,240``; a count that is not whole has two decimals: ``0.50``."""
    if not abs(value) < _MAX_WRITTEN_OUT:  # not a number, either
        return number(value)
    return f"{int(value):,}" if value == int(value) else f"{value:,.2f}"


def number(value: float, digits: int = 4) -> str:
    """Return a measured value as text, with ``digits`` significant digits.

    Whole numbers below a million have all their digits.
    """
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    # "3e9", not "3e+09".
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.{digits}g}")


def moment(seconds: float) -> str:
    """Return seconds since 1970 as local date and time: ``2026-03-01 14:05:09``."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: "; did you mean lr?", or ""."""
    close = get_close_matches(name, [*known], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, in which the cells of a column begin below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def memory(num_bytes: int) -> str:
    """Return bytes as text: ``412 MB``, ``1.2 GB``.

    The units are decimal: 1 MB is a million bytes.
    """
    megabytes = num_bytes / 1e6
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1000:.1f} GB"


def rate(per_second: float, unit: str) -> str:
    """Return a rate as text: ``12.3 it/s``, or ``2.50 s/it`` if an item takes over a second.

    Args:
        per_second: items per second; the result is "" if they are not above 0, or not finite.
    """
    if per_second <= 0 or not math.isfinite(per_second):
        return ""
    if per_second < 1:
        return f"{_three_digits(1 / per_second)} s/{unit}"
    return f"{_three_digits(per_second)} {unit}/s"


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as text: ``rank 2``, ``ranks 0-3 and 6``."""
    ordered = sorted(set(ranks))
    starts = [r for i, r in enumerate(ordered) if i == 0 or ordered[i - 1] != r - 1]
    ends = [a for a, b in pairwise(ordered) if b != a + 1] + ordered[-1:]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    listed = " and ".join([", ".join(parts[:-1]), *parts[-1:]] if len(parts) > 1 else parts)
    return f"rank{'s' if len(ordered) != 1 else ''} {listed}"


# Characters of a number in full; a sampler's have 18.
_MAX_FLOAT = 10
# How many settings of a configuration are shown.
_SETTINGS = 4


class _Arguments(reprlib.Repr):
    """Makes short texts of arguments; an object such as a model becomes the name of its type.

    Of a namespace or a dataclass the settings are shown, but for a dataclass's defaults.
    """

    def repr_float(self, x: float, level: int) -> str:
        return repr(x) if len(repr(x)) <= _MAX_FLOAT else f"{x:.6g}"

    def repr_instance(self, x: Any, level: int) -> str:
        if type(x).__module__ == "numpy" and getattr(x, "shape", None) == ():
            return self.repr1(x.item(), level)
        if x is None or isinstance(x, (Number, PurePath)):
            return repr(x)
        if isinstance(x, (type, FunctionType)):
            return x.__name__
        name, known = type(x).__name__, getattr(x, "__dict__", {})
        if is_dataclass(x):
            defaults = {one.name: one.default for one in fields(x) if one.repr}
            known = {k: v for k, v in known.items() if v is not defaults.get(k, v)}
        elif not isinstance(x, (Namespace, SimpleNamespace)):
            return name
        if not known or level <= 0:
            return name
        settings = [f"{k}={self.repr1(v, level - 1)}" for k, v in islice(known.items(), _SETTINGS)]
        return f"{name}({', '.join(settings)}{', ...' if len(known) > _SETTINGS else ''})"


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the arguments of a call as a short text, like in code: ``0.1, Net, epochs=3``."""
    text = _Arguments()
    named = [f"{name}={text.repr(value)}" for name, value in kwargs.items()]
    return ", ".join([*map(text.repr, args), *named])
