"""Run code under torch's profiler: a trace file per rank, and a table of the slowest operators."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from torch import profiler

from notebook_accel.training.settings.handlers import ProfileKwargs
from notebook_accel.training.settings.notices import notice_once

# The operators that take longest: what fits below a cell without scrolling.
_NUM_ROWS = 12


@contextmanager
def profile(options: ProfileKwargs, rank: int) -> Iterator[profiler.profile]:
    """Return a context that profiles its block with torch's profiler, and yields the profiler.

    When the block ends, the trace is written to ``options.output_trace_dir`` (None: not written),
    and a table of the operators is displayed. The notebook shows the table of rank 0 below the
    cell; ``run.show(rank)`` shows that of another rank. In a plain script no table is displayed.
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
        path = folder / f"profile_{rank}.json"
        running.export_chrome_trace(str(path))
    display = getattr(builtins, "display", None)
    # A schedule may have ended between two of its stretches: there is nothing to tell then.
    if display is not None and running.profiler.function_events:
        averages: Any = running.key_averages()
        on_device = any(each.self_device_time_total for each in averages)
        sort_by = "self_device_time_total" if on_device else "self_cpu_time_total"
        where = "" if path is None else f"; trace in {path}"
        table = averages.table(sort_by=sort_by, row_limit=_NUM_ROWS)
        text = f"Rank {rank}: operators by their own time{where}\n{table}"
        # Text alone would go to the rank's log.
        display({"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}, raw=True)
