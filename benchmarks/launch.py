"""Call to return of a launch from a notebook, and how many ranks come up.

Every rank builds an Accelerator and makes one AdamW step. Each repeat has a fresh IPython kernel a
contender, in turn: the first launch there, then more of them. Ours has two: a kernel that launches
at once after the import, and one whose first launch comes five seconds later. Peers run the same
step: accelerate in a fresh kernel (each rank imports again what the kernel has not), accelerate in
a kernel that has made an optimizer before, torch.multiprocessing.spawn and torchrunx.

Then 2 to 128 ranks that start and end, without and with a gloo group of all: beside forks of bare
torch, and beside accelerate up to 32 ranks.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

from timing import Kernel, Measurement, arguments, interleave, median, seconds, table

if TYPE_CHECKING:
    from collections.abc import Callable

OURS = "notebook_accel, after the first"
FRESH = "accelerate, fresh kernel"
COUNTS = (2, 8, 48, 128)
ACCELERATE_UP_TO = 32
LIMIT = 60.0
PAUSE = 5.0

SETUP = f"""
    import json, sys, time
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import torch

    def timed(call, times=1):
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        print("BENCHMARK", json.dumps({{"seconds": sorted(taken)[len(taken) // 2]}}))
"""

OUR_STEP = """
    from notebook_accel import Accelerator, notebook_launcher

    def train():
        accelerator = Accelerator()
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(4, 8)).sum())
        optimizer.step()
        return accelerator.num_processes

    def launch():
        assert list(notebook_launcher(train, num_processes=2)) == [2, 2]
"""

ACCELERATE = """
    import work
    from accelerate import notebook_launcher

    def launch():
        notebook_launcher(work.step, num_processes=2, use_port=str(work.free_port()))
"""

SPAWN = """
    import work
    from torch import multiprocessing

    def launch():
        multiprocessing.spawn(work.spawned_step, args=(2, work.free_port()), nprocs=2)
"""

TORCHRUNX = """
    import cloudpickle, os, torchrunx, work

    os.environ["TORCHRUNX_LOG_DIR"] = ""  # else it leaves a folder of logs here
    cloudpickle.register_pickle_by_value(work)  # its processes do not find the module

    def launch():
        launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=2, backend="gloo")
        results = launcher.run(work.step).results
        assert all(count == 2 for counts in results.values() for count in counts), results
"""


def in_kernel(*cells: str) -> list[Measurement]:
    """Run the cells in one fresh kernel; what each of them reported."""
    with Kernel.open() as kernel:
        kernel.run(dedent(SETUP))
        return [kernel.run(dedent(cell)) for cell in cells]


def measure_ours(_name: str) -> Measurement:
    """The first launch of a kernel, at once after the import, and the median of five after it."""
    _, first, later = in_kernel(OUR_STEP, "timed(launch)", "timed(launch, 5)")
    return {"first": first["seconds"], "seconds": later["seconds"]}


def measure_ours_later(_name: str) -> Measurement:
    """The first launch of a kernel that imported the launcher some seconds before."""
    pause = f"time.sleep({PAUSE})"
    return {"seconds": in_kernel(OUR_STEP, pause, "timed(launch)")[2]["seconds"]}


def measure_accelerate(_name: str) -> Measurement:
    """The first launch of a kernel, and one after the kernel has made an optimizer."""
    make = "torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())"
    _, fresh, _, warm = in_kernel(ACCELERATE, "timed(launch)", make, "timed(launch, 5)")
    return {"seconds": fresh["seconds"], "warm": warm["seconds"]}


def measure_peer(setup: str) -> Measurement:
    """One launch in a fresh kernel."""
    return {"seconds": in_kernel(setup, "timed(launch)")[1]["seconds"]}


MEASURES: dict[str, Callable[[str], Measurement]] = {
    "notebook_accel": measure_ours,
    "notebook_accel, after a pause": measure_ours_later,
    "accelerate": measure_accelerate,
    "torch mp.spawn": lambda _: measure_peer(SPAWN),
    "torchrunx": lambda _: measure_peer(TORCHRUNX),
}


def safely(measure: Callable[[str], Measurement], name: str) -> Measurement:
    """A measurement, or why there is none."""
    try:
        return measure(name)
    except (RuntimeError, TimeoutError) as error:
        return {"failed": str(error)[:80]}


def print_steps(repeats: int) -> None:
    """Two ranks, one step: all contenders."""
    found = interleave(list(MEASURES), repeats, measure=lambda name: safely(MEASURES[name], name))
    base = median(found["accelerate"], "seconds")
    rows = [
        (OURS, median(found["notebook_accel"], "seconds")),
        (
            f"notebook_accel, first, {PAUSE:.0f} s after the import",
            median(found["notebook_accel, after a pause"], "seconds"),
        ),
        ("notebook_accel, first, at once", median(found["notebook_accel"], "first")),
        (FRESH, base),
        ("accelerate, kernel that made an optimizer", median(found["accelerate"], "warm")),
        ("torch mp.spawn", median(found["torch mp.spawn"], "seconds")),
        ("torchrunx", median(found["torchrunx"], "seconds")),
    ]
    print(f"\n2 CPU ranks, Accelerator and one AdamW step; median of {repeats} kernels")
    print(table([_row(name, value, base) for name, value in rows]))
    for name, measurements in found.items():
        for failed in {m["failed"] for m in measurements if "failed" in m}:
            print(f"{name} failed: {failed}")


def _row(name: str, value: float | None, base: float | None) -> dict[str, str]:
    ratio = f"{value / base:.2f}" if value and base else "-"
    return {"contender": name, "call to return": seconds(value), "to accelerate": ratio}


# ---------------------------------------------------------------- many ranks

OUR_RANKS = """
    import work
    from notebook_accel import notebook_launcher

    def launch(count, group):
        function = work.form_group if group else (lambda: count)
        assert list(notebook_launcher(function, num_processes=count)) == [count] * count
    launch(2, False)
"""

ACCELERATE_RANKS = """
    import work
    from accelerate import notebook_launcher

    def launch(count, group):
        function = work.form_group if group else (lambda: count)
        notebook_launcher(function, num_processes=count, use_port=str(work.free_port()))
    launch(2, False)
"""

FORK_RANKS = """
    import work
    from torch import multiprocessing

    def launch(count, group):
        function = work.spawned_group if group else work.spawned_nothing
        multiprocessing.start_processes(
            function, args=(count, work.free_port()), nprocs=count, start_method="fork"
        )
    launch(2, False)
"""

# The fork is the floor: torch alone, without results, output or care for what fails.
RANKS = {"notebook_accel": OUR_RANKS, "torch fork": FORK_RANKS, "accelerate": ACCELERATE_RANKS}


def measure_ranks(name: str, count: int, group: bool) -> str:
    """How long ``count`` ranks take, in a kernel that has launched before."""

    def one(_name: str) -> Measurement:
        with Kernel.open() as kernel:
            kernel.run(dedent(SETUP + RANKS[name]), limit=LIMIT)
            return kernel.run(f"timed(lambda: launch({count}, {group}))", limit=LIMIT)

    found = safely(one, name)
    return seconds(found.get("seconds")) if "failed" not in found else found["failed"]


def print_ranks(counts: list[int]) -> None:
    """Ranks that only start and end, and ranks that also form a gloo group."""
    rows = []
    for count in counts:
        for name in RANKS:
            if name == "accelerate" and count > ACCELERATE_UP_TO:
                continue
            times = [measure_ranks(name, count, group) for group in (False, True)]
            rows.append({"ranks": count, "contender": name, "alone": times[0], "gloo": times[1]})
    print("\nCall to return for many ranks, without and with a gloo group of all")
    print(table(rows))


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--ranks", type=int, nargs="*", help=f"how many, default {COUNTS}")
    options = parser.parse_args()
    print_steps(1 if options.quick else options.repeats)
    print_ranks(options.ranks or list(COUNTS[:1] if options.quick else COUNTS))


if __name__ == "__main__":
    main()
