"""A stretch of code under torch's profiler, with one trace a rank."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import profiler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from notebook_accel.training.settings import ProfileKwargs

__all__ = ["profile"]


@contextmanager
def profile(options: ProfileKwargs, rank: int) -> Iterator[profiler.profile]:
    """Profile the block; the trace is written when it ends, if there is a folder for it."""
    plain = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
    arguments: dict[str, Any] = {name: getattr(options, name) for name in plain}
    if options.activities is not None:
        kinds = profiler.ProfilerActivity
        arguments["activities"] = [getattr(kinds, name.upper()) for name in options.activities]
    if options.schedule_option is not None:
        arguments["schedule"] = profiler.schedule(**options.schedule_option)
    with profiler.profile(on_trace_ready=options.on_trace_ready, **arguments) as running:
        yield running
    if options.output_trace_dir is not None:
        folder = Path(options.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(folder / f"profile_{rank}.json"))
