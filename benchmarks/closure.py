"""A 1 GB tensor in the closure of the training function, 4 ranks: time and memory.

Each rank adds the tensor up, waits until the memory of all processes was read, writes to every
page of its copy, and waits again. Memory is the proportional share (PSS) of every process that
belongs to the launch and of the one that launches, less what that one held before.
Peers: fork and spawn of torch.multiprocessing, and torchrunx.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from timing import Measurement, arguments, interleave, median, report, seconds, table
from torch import multiprocessing

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 4
# What a contender holds grows too fast for more: torchrunx had 5.9 GB for 200 MB.
UP_TO = {"torchrunx": 200}
DEADLINE = 100.0


class Meeting:
    """Files by which ranks say that they came to a point, and learn that they may go on."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def arrive(self, point: str) -> None:
        """In a rank: say so, and wait for ``release``."""
        (Path(self.folder) / f"{point}-{os.getpid()}").touch()
        self._until((Path(self.folder) / f"{point}.go").exists)

    def gather(self, point: str) -> None:
        """In the one that launches: wait until all ranks came."""
        self._until(lambda: len(list(Path(self.folder).glob(f"{point}-*"))) == RANKS)

    def release(self, point: str) -> None:
        """Let the ranks go on."""
        (Path(self.folder) / f"{point}.go").touch()

    @staticmethod
    def _until(true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError("a rank did not come in time")
            time.sleep(0.002)


def visit(tensor: torch.Tensor, meeting: Meeting) -> float:
    """What a rank does: read all, meet, write all, meet."""
    total = float(tensor.sum())
    meeting.arrive("read")
    tensor.add_(1)
    meeting.arrive("written")
    return total


def visit_as(_rank: int, tensor: torch.Tensor, meeting: Meeting) -> None:
    """``visit`` as torch.multiprocessing calls it."""
    visit(tensor, meeting)


def launch_ours(tensor: torch.Tensor, meeting: Meeting) -> None:
    """Our launcher, with the tensor in the closure."""
    from notebook_accel import notebook_launcher

    notebook_launcher(lambda: visit(tensor, meeting), num_processes=RANKS, view="none")


def launch_started(method: str, tensor: torch.Tensor, meeting: Meeting) -> None:
    """torch.multiprocessing by this start method. Spawn pickles a copy: no shared memory."""
    private = partial(_call_with_copy, tensor.numpy()) if method == "spawn" else None
    function = private or partial(_call_with, tensor)
    multiprocessing.start_processes(function, args=(meeting,), nprocs=RANKS, start_method=method)


def _call_with(tensor: torch.Tensor, rank: int, meeting: Meeting) -> None:
    visit_as(rank, tensor, meeting)


def _call_with_copy(array: object, rank: int, meeting: Meeting) -> None:
    visit_as(rank, torch.as_tensor(array), meeting)


def launch_torchrunx(tensor: torch.Tensor, meeting: Meeting) -> None:
    """torchrunx, which sends what the function holds."""
    import torchrunx

    os.environ["TORCHRUNX_LOG_DIR"] = ""  # else it leaves a folder of logs here
    launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=RANKS, backend="gloo")
    launcher.run(lambda: visit(tensor, meeting))


CONTENDERS: dict[str, Callable[[torch.Tensor, Meeting], None]] = {
    "notebook_accel": launch_ours,
    "fork": partial(launch_started, "fork"),
    "spawn": partial(launch_started, "spawn"),
    "torchrunx": launch_torchrunx,
}


def memory() -> int:
    """Bytes of this process and everything that descends from it or was started for it."""
    this = psutil.Process()
    mine = {this, *this.children(recursive=True), *_detached(this)}
    total = 0
    for process in mine:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


def _detached(this: psutil.Process) -> set[psutil.Process]:
    """Processes that carry this one's mark in their environment, in whatever session they are."""
    marked = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("CLOSURE_BENCHMARK") == str(this.pid):
                marked.add(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return marked


def measure(name: str, megabytes: int) -> None:
    """Measure one contender in this process, and report it."""
    os.environ["CLOSURE_BENCHMARK"] = str(os.getpid())
    warm_up(name)
    tensor = torch.ones(megabytes * 1_000_000 // 4)
    before = memory()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Meeting(folder)
        found: Measurement = {}
        start = time.perf_counter()
        thread = threading.Thread(target=CONTENDERS[name], args=(tensor, meeting))
        thread.start()
        for point in ("read", "written"):
            meeting.gather(point)
            found[f"{point} at"] = time.perf_counter() - start
            found[point] = (memory() - before) / 1e9
            meeting.release(point)
        thread.join()
    report(found)


def warm_up(name: str) -> None:
    """Launch once without a tensor, so that what a first launch starts is not measured."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Meeting(folder)
        meeting.release("read")
        meeting.release("written")
        CONTENDERS[name](torch.ones(1), meeting)


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--megabytes", type=int, help="of the tensor, default 1000")
    options = parser.parse_args()
    megabytes = options.megabytes or (100 if options.quick else 1000)
    if options.one:
        measure(options.one, megabytes)
        return
    names = [name for name in CONTENDERS if megabytes <= UP_TO.get(name, megabytes)]
    repeats = 1 if options.quick else options.repeats
    found = interleave(names, repeats, ["--megabytes", str(megabytes)])
    base = median(found["fork"], "read at")
    print(f"{megabytes} MB in the closure, {RANKS} ranks; median of {repeats}")
    print(table([_row(name, found[name], base) for name in names]))
    print(f"one copy of the tensor in this process: {seconds(_copy(megabytes))}")
    for name in set(CONTENDERS) - set(names):
        print(f"{name} is not tried above {UP_TO[name]} MB")


def _copy(megabytes: int) -> float:
    tensor = torch.ones(megabytes * 1_000_000 // 4)
    start = time.perf_counter()
    tensor.clone()
    return time.perf_counter() - start


def _row(name: str, measurements: list[Measurement], base: float | None) -> dict[str, str]:
    taken = median(measurements, "read at")
    if taken is None:
        failed = str(measurements[0]["failed"])
        return {"contender": name, "until all have read": failed} | dict.fromkeys(
            ("to fork", "memory, read", "memory, written"), "-"
        )
    return {
        "contender": name,
        "until all have read": seconds(taken),
        "to fork": f"{taken / base:.2f}" if base else "-",
        "memory, read": f"{median(measurements, 'read'):.2f} GB",
        "memory, written": f"{median(measurements, 'written'):.2f} GB",
    }


if __name__ == "__main__":
    main()
