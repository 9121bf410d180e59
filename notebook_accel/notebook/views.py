"""Which view a run gets: the one table from names to views."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError
from notebook_accel.launch.view import View
from notebook_accel.launch.view.plain import PlainView
from notebook_accel.launch.view.terminal import TerminalView
from notebook_accel.notebook import clicks
from notebook_accel.notebook.cell_dashboard import CellDashboard
from notebook_accel.notebook.dashboard import Dashboard
from notebook_accel.notebook.transcript import Transcript
from notebook_accel.text_values import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from notebook_accel.notebook.display_slot import DisplaySlot

__all__ = ["VIEWS", "choose_view", "dashboard_in"]


@dataclass(frozen=True, kw_only=True)
class _Caller:
    """Who asks for a view.

    Attributes:
        kernel: the kernel in which the launcher was called; None in a terminal or plain Python.
        waits: whether the cell waits for the run.
        is_cell: whether the run is a cell (``%%accelerate``).
    """

    kernel: Any | None
    waits: bool
    is_cell: bool


def _widgets(caller: _Caller) -> View:
    if caller.kernel is None:
        raise ConfigError(
            "view='widgets': this code does not run in a notebook's kernel, which widgets need; "
            "take view='text'"
        )
    return dashboard_in(caller.kernel, waits=caller.waits, is_cell=caller.is_cell)


def _text(caller: _Caller) -> View:
    if caller.kernel is None:
        # Bars that move in their place need a terminal; in a file each move would be a line.
        kind = TerminalView if sys.stdout.isatty() else PlainView
        return kind(is_cell=caller.is_cell)
    return Transcript(waits=caller.waits, is_cell=caller.is_cell)


def _automatic(caller: _Caller) -> View:
    is_watched = caller.kernel is not None and clicks.can_answer(caller.kernel)
    return _widgets(caller) if is_watched else _text(caller)


def _nothing(_caller: _Caller) -> View:
    return View()


VIEWS: Mapping[str, Callable[[_Caller], View]] = {
    "auto": _automatic,
    "widgets": _widgets,
    "text": _text,
    "none": _nothing,
}


def dashboard_in(
    kernel: Any, *, waits: bool = True, is_cell: bool = False, slot: DisplaySlot | None = None
) -> Dashboard:
    """The live panel for the pages of ``kernel``; the arguments are those of :class:`Dashboard`."""
    way = clicks.clicks_for(kernel)
    kind = Dashboard if way.draws_between_cells else CellDashboard
    return kind(way, waits=waits, is_cell=is_cell, slot=slot)


def choose_view(name: str, *, waits: bool = True, is_cell: bool = False) -> View:
    """The view of that name, for the kernel or terminal in which this code runs.

    Args:
        name: "auto", "widgets", "text" or "none".
        waits: whether the cell waits for the run.
        is_cell: whether the run is a cell (``%%accelerate``).

    Raises:
        ConfigError: there is no such view, or it cannot be had here.
    """
    if not isinstance(name, str) or name not in VIEWS:
        raise ConfigError(f"view={shown(name)}: expected one of {', '.join(map(repr, VIEWS))}")
    return VIEWS[name](_Caller(kernel=clicks.find_kernel(), waits=waits, is_cell=is_cell))
