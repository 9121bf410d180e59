"""What the notebooks of the chaos run: in the kernel, and in the ranks."""

import ctypes
import gc
import os
import subprocess
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from notebook_accel import LaunchError, NotebookAccelError
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.template.handle import follow, warm
from notebook_accel.wire import ImportItem
from tests.launches import launch

_END_SECONDS = 20.0

_runs = []
# What each template imports for all ranks, as if a cell had imported it.
if _imported := os.environ.get("CHAOS_IMPORTS"):
    warm()
    follow(map(ImportItem, _imported.split()))


# ---- in the ranks --------------------------------------------------------------------------


def _loop(_: Any) -> None:
    from notebook_accel.rank import this_rank

    step = 0
    while True:
        this_rank.current().metric({"step": step}, step)
        print("step", step)
        time.sleep(0.005)
        step += 1


def _collective(_: Any) -> None:
    dist.init_process_group("gloo")
    while True:
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.002)


def _native(_: Any) -> None:
    _lock_twice(ctypes.CDLL(None))


def _native_with_the_gil(_: Any) -> None:
    _lock_twice(ctypes.PyDLL(None))


def _lock_twice(libc: Any) -> None:
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


def _loader(_: Any) -> None:
    subprocess.Popen(["setsid", "sleep", "600"])
    data = [torch.ones(1000) * number for number in range(64)]
    while True:
        for _ in DataLoader(data, batch_size=8, num_workers=2):
            time.sleep(0.002)


def _brief(weights: Any) -> Any:
    time.sleep(0.05 * int(os.environ["RANK"]))
    return weights + 1


def _raises(_: Any) -> None:
    time.sleep(0.2)
    raise ValueError("as it should")


KINDS = {
    "loop": _loop,
    "collective": _collective,
    "native": _native,
    "native with the GIL": _native_with_the_gil,
    "loader": _loader,
    "brief": _brief,
    "raises": _raises,
}


# ---- in the kernel -------------------------------------------------------------------------


def start(kind: str, num_processes: int) -> str:
    return _tried(lambda: _runs.append(_launch(kind, num_processes, block=False)))


def follow(kind: str, num_processes: int) -> str:
    return _tried(lambda: _launch(kind, num_processes, block=True))


def _tried(act: Any) -> str:
    try:
        act()
    except (NotebookAccelError, KeyboardInterrupt) as error:
        return type(error).__name__
    return "ok"


def _launch(kind: str, num_processes: int, *, block: bool) -> Any:
    config = LaunchConfig(num_processes=num_processes, devices="cpu", grace=1.0)
    # Large enough to travel in a segment of its own.
    weights = torch.zeros(100_000)
    return launch(KINDS[kind], (weights,), config=config, block=block)


def stop() -> str:
    if _runs:
        _runs[-1].stop()
    return "ok"


def end() -> list[str]:
    """Kill what still runs; gives how each run ended, or what is wrong with it."""
    for run in _runs:
        run.kill()
    ended = [_how_it_ended(run) for run in _runs]
    _runs.clear()
    return ended


def _how_it_ended(run: Any) -> str:
    try:
        run.wait(_END_SECONDS)
    except TimeoutError:
        return f"WRONG: a run of {run.name} did not end: {run.state}"
    except NotebookAccelError as error:
        return f"{run.status}: {type(error).__name__}"
    except Exception as error:
        return f"WRONG: a run of {run.name} ended with {error!r}"
    return str(run.status)


def work() -> str:
    """Whether a launch does what it should."""
    try:
        ones = launch(_brief, (1,), config=_PLAIN).results
    except LaunchError as error:
        return f"WRONG: no launch after all that: {error}"
    return "ok" if ones == [2, 2] else f"WRONG: a launch gave {ones}"


_PLAIN = LaunchConfig(num_processes=2, devices="cpu")


def count_files() -> dict[str, str]:
    gc.collect()
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return found
