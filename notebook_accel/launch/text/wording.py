"""Numbers, ranks and arguments as a person reads them."""

from __future__ import annotations

import math
import re
import reprlib
from itertools import pairwise
from numbers import Number
from pathlib import PurePath
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["arguments", "clock", "count", "memory", "number", "rank_list", "rate", "span"]

# A count above it, and one that is not finite, is written as a measured value is.
_MAX_WRITTEN_OUT = 1e15


def clock(seconds: float) -> str:
    """Seconds as a clock shows them: ``0:42``, ``1:02:33``."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def span(seconds: float) -> str:
    """How long something took: ``3.2 s``, ``1:02`` from a minute on."""
    return f"{max(0.0, seconds):.1f} s" if seconds < 60 else clock(seconds)


def count(value: float) -> str:
    """A count with separators, ``1,240``; one that is no whole number has two decimals."""
    if not abs(value) < _MAX_WRITTEN_OUT:  # not a number, either
        return number(value)
    return f"{int(value):,}" if value == int(value) else f"{value:,.2f}"


def number(value: float, digits: int = 4) -> str:
    """A measured value with some digits; whole numbers below a million are written out."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    # "3e9", not "3e+09".
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.{digits}g}")


def memory(num_bytes: int) -> str:
    """``412 MB``, ``1.2 GB``: decimal units, as disks and devices are sold in."""
    megabytes = num_bytes / 1e6
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1000:.1f} GB"


def rate(per_second: float, unit: str) -> str:
    """``12.3 it/s``, ``2.5 s/it`` where one takes longer than a second; "" for no rate at all."""
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
    """``rank 2``, ``ranks 0-3 and 6``."""
    ordered = sorted(set(ranks))
    starts = [r for i, r in enumerate(ordered) if i == 0 or ordered[i - 1] != r - 1]
    ends = [a for a, b in pairwise(ordered) if b != a + 1] + ordered[-1:]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    listed = " and ".join([", ".join(parts[:-1]), *parts[-1:]] if len(parts) > 1 else parts)
    return f"rank{'s' if len(ordered) != 1 else ''} {listed}"


class _Arguments(reprlib.Repr):
    """Short texts of arguments. A model or a table says its type alone: its repr may take long."""

    def repr_instance(self, x: Any, level: int) -> str:
        if x is None or isinstance(x, (Number, PurePath)):
            return repr(x)
        return x.__name__ if isinstance(x, (type, FunctionType)) else type(x).__name__


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments of a call as they are typed: ``0.1, Net, epochs=3``."""
    text = _Arguments()
    named = [f"{name}={text.repr(value)}" for name, value in kwargs.items()]
    return ", ".join([*map(text.repr, args), *named])
