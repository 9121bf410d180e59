"""Launches many times from one process, and looks at what that leaves in it.

    python -m tests.soak [--launches 1000]

Each round launches on one rank: a small result, a result of 2 MB, which travels by descriptor, and
every tenth time a function that raises. Handles are dropped, as in a notebook whose cell is run
again. Ends with 1 where descriptors, threads, children or mappings grew, or memory by over 30 MB,
after the first tenth of the launches, in which caches and the list of runs fill up.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from notebook_accel import WorkerError
from notebook_accel.config import LaunchConfig
from tests.launches import launch

_MAX_BYTES = 30_000_000


@dataclass(frozen=True)
class Traces:
    """What launches may leave in the process that made them."""

    descriptors: int
    threads: int
    children: int
    segments: int
    folders: int
    num_bytes: int

    def grown_since(self, before: Traces) -> list[str]:
        """Lines about all that is more than it was."""
        was = asdict(before)
        # The 50 runs that the list holds, and the newest 50 of the others.
        allowed = {"num_bytes": _MAX_BYTES, "folders": max(0, 101 - before.folders)}
        return [
            f"{name}: {was[name]:,} -> {value:,}"
            for name, value in asdict(self).items()
            if value - was[name] > allowed.get(name, 0)
        ]


def look() -> Traces:
    gc.collect()
    me = psutil.Process()
    maps = Path("/proc/self/maps").read_text()
    return Traces(
        descriptors=me.num_fds(),
        threads=threading.active_count(),
        children=len(me.children()),
        segments=maps.count("memfd:notebook_accel"),
        folders=len(os.listdir(os.environ["NOTEBOOK_ACCEL_RUNS"])),
        num_bytes=me.memory_info().rss,
    )


def soak(num_launches: int) -> list[str]:
    import torch

    weights = torch.zeros(500_000)

    def small() -> int:
        print("a line")
        return 1

    def large() -> torch.Tensor:
        return weights + 1

    def fails() -> None:
        raise ValueError("as it should")

    config = LaunchConfig(num_processes=1, devices="cpu")
    before = None
    started = time.monotonic()
    for number in range(num_launches):
        function = fails if number % 10 == 9 else (small, large)[number % 2]
        with contextlib.suppress(WorkerError):
            assert launch(function, config=config)[0] is not None
        if number % max(1, num_launches // 10) == 0 and number:
            now = look()
            before = before or now
            print(f"{number:5} launches {time.monotonic() - started:6.0f} s  {now}", flush=True)
    after = look()
    print(f"{num_launches:5} launches {time.monotonic() - started:6.0f} s  {after}", flush=True)
    return after.grown_since(before) if before else []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=1000)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NOTEBOOK_ACCEL_RUNS"] = folder
        grown = soak(parser.parse_args().launches)
    print("\n".join(grown) or "nothing has grown")
    sys.exit(bool(grown))
