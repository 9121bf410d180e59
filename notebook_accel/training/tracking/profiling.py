"""A stretch of code under torch's profiler: one trace a rank, and a table of what took the time."""

from __future__ import annotations

import builtins
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accel.training.files.file_names import PROFILE_PATTERN_NAME
from notebook_accel.training.settings.notices import notice_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import profiler

    from notebook_accel.training.settings.handlers import ProfileKwargs

__all__ = ["ProfileSummary", "profile"]

# The operators that take longest: what fits below a cell without scrolling.
_NUM_ROWS = 12


@contextmanager
def profile(options: ProfileKwargs, rank: int) -> Iterator[profiler.profile]:
    """Profile the block.

    When it ends, the trace is written, if there is a folder for it, and a table of the operators
    is displayed where something displays: in a rank (the notebook shows rank 0's below the panel,
    that of another by ``run.show(rank)``) and in a notebook's kernel.
    """
    with options.build() as running:
        yield running
    if running.profiler is None:
        notice_once(
            "profile",
            "profile(): its schedule had not begun to record when the block ended: nothing is "
            "written; call step() on the profiler after each step of the training",
        )
        return
    path = None
    if options.output_trace_dir is not None:
        folder = Path(options.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / PROFILE_PATTERN_NAME.format(suffix=rank)
        running.export_chrome_trace(str(path))
    display = getattr(builtins, "display", None)
    # A schedule may have ended between two of its stretches: there is nothing to tell then.
    if display is not None and running.profiler.function_events:
        display(ProfileSummary(running, rank, path))


class ProfileSummary:
    """A table of the operators that took the most time, as HTML and as text.

    Args:
        profiled: the profiler, which has ended.
        rank: whose it is.
        path: of the trace; None where none was written.
    """

    def __init__(self, profiled: profiler.profile, rank: int, path: Path | None) -> None:
        averages: Any = profiled.key_averages()
        device_time = sum(each.self_device_time_total for each in averages)
        self._sort_by = "self_device_time_total" if device_time else "self_cpu_time_total"
        self._averages = averages
        where = "" if path is None else f"; trace in {path}"
        self.title = f"Rank {rank}: operators by their own time{where}"
        columns = {"self CPU": "self_cpu_time_total", "CPU": "cpu_time_total"}
        if device_time:
            columns |= {"self device": "self_device_time_total", "device": "device_time_total"}
        ranked = sorted(averages, key=lambda each: -getattr(each, self._sort_by))
        self.columns = ["operator", "calls", *columns]
        self.rows = [
            [each.key, str(each.count), *(_duration(getattr(each, it)) for it in columns.values())]
            for each in ranked[:_NUM_ROWS]
        ]

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<p>{escape(self.title)}</p><table><tr>{head}</tr>{rows}</table>"

    def __repr__(self) -> str:
        table: str = self._averages.table(sort_by=self._sort_by, row_limit=_NUM_ROWS)
        return f"{self.title}\n{table}"


def _duration(microseconds: float) -> str:
    if microseconds < 1e3:
        return f"{microseconds:.0f} us"
    return f"{microseconds / 1e3:.1f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"
