"""What the benchmarks share: contenders in clean processes, interleaved repeats, one table.

A benchmark names its contenders and, called with ``--one NAME``, measures that one alone and
prints a line of JSON. Called without, it starts itself once for each contender and repeat, in
turn, so that what the machine does meanwhile meets all of them alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from jupyter_client.manager import KernelManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "Kernel",
    "Measurement",
    "arguments",
    "in_turn",
    "interleave",
    "median",
    "report",
    "seconds",
    "table",
]

Measurement = dict[str, Any]
_Contender = TypeVar("_Contender")
_Found = TypeVar("_Found")

_MARK = "BENCHMARK "


def arguments(description: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").strip().splitlines()[0])
    parser.add_argument("--repeats", type=int, default=repeats, help="measure each so often")
    parser.add_argument("--quick", action="store_true", help="one repeat of a smaller case")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def report(measurement: Measurement) -> None:
    """Give what was measured back to the process that asked (used with ``--one``)."""
    print(_MARK + json.dumps(measurement), flush=True)


def interleave(
    names: Sequence[str],
    repeats: int,
    extra: Sequence[str] = (),
    *,
    limit: float = 120,
    measure: Callable[[str], Measurement] | None = None,
) -> dict[str, list[Measurement]]:
    """Measure every contender ``repeats`` times, in turn.

    Args:
        names: the contenders.
        extra: more arguments for the script when it measures one.
        limit: seconds after which one measurement counts as never ended.
        measure: measures one by its name; by default the script starts itself with ``--one``.

    Returns:
        A list of measurements for each name; a failed one is ``{"failed": why}``.
    """
    one = measure or (lambda name: _in_a_process([sys.argv[0], "--one", name, *extra], limit))
    found: dict[str, list[Measurement]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            found[name].append(one(name))
    return found


def in_turn(
    contenders: Mapping[str, _Contender], measure: Callable[[_Contender], _Found], repeats: int
) -> dict[str, list[_Found]]:
    """Measure contenders that live in one process ``repeats`` times, in turn; the first time is
    thrown away."""
    spent: dict[str, list[_Found]] = {name: [] for name in contenders}
    for contender in contenders.values():
        measure(contender)
    gc.collect()
    gc.disable()
    names = list(contenders)
    for _ in range(repeats):
        for name in names:
            spent[name].append(measure(contenders[name]))
        names.append(names.pop(0))  # each is first and last as often
    gc.enable()
    return spent


def _in_a_process(command: Sequence[str], limit: float) -> Measurement:
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end in {limit:.0f} s"}
    finally:
        _end_session(process)
    lines = [line for line in out.splitlines() if line.startswith(_MARK)]
    if not lines:
        reason = err.strip().splitlines() or [f"exit code {process.returncode}"]
        return {"failed": reason[-1][:100]}
    found: Measurement = json.loads(lines[-1].removeprefix(_MARK))
    return found


def _end_session(process: subprocess.Popen[str]) -> None:
    """End what a contender left in its session; some peers leave their workers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def median(measurements: Sequence[Measurement], key: str) -> float | None:
    """The median of ``key`` over the measurements that did not fail, or None."""
    values = [m[key] for m in measurements if m.get(key) is not None]
    return statistics.median(values) if values else None


def seconds(value: float | None) -> str:
    """A time in the unit that suits it."""
    if value is None:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.1f} us"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of equal keys as aligned text."""
    heads = list(rows[0])
    cells = [heads, *[[str(row[head]) for head in heads] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


class Kernel:
    """A fresh IPython kernel, as a notebook has one."""

    def __init__(self) -> None:
        os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
        # Pip compiles what it installs, the peers; the package in this folder is compiled once too.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel()
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[Kernel]:
        """A kernel that is shut down at the end."""
        kernel = cls()
        try:
            yield kernel
        finally:
            kernel.close()

    def run(self, code: str, *, limit: float = 120) -> Measurement:
        """Execute a cell; what it printed, and the measurement that it reported, if any.

        Raises:
            RuntimeError: the cell raised.
            TimeoutError: the cell did not end in time.
        """
        parts: list[str] = []
        start = time.perf_counter()
        reply = self._client.execute_interactive(
            code, timeout=limit, output_hook=lambda message: parts.append(_text(message))
        )
        wall = time.perf_counter() - start
        text = "".join(parts)
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{reply['content']['ename']}: {reply['content']['evalue']}")
        marked = [line for line in text.splitlines() if line.startswith(_MARK)]
        found = json.loads(marked[-1].removeprefix(_MARK)) if marked else {}
        return {"text": text, "wall": wall, **found}

    def close(self) -> None:
        """End the kernel and what it left in its session."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def _text(message: Mapping[str, Any]) -> str:
    return str(message["content"].get("text", ""))
