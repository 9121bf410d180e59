"""What 16, 32 and 64 ranks of one machine take: their time, and their kernel's memory.

Each rank builds an Accelerator, trains a tiny model on the CPU and, at each step, prints, logs and
moves a bar. Each count has a fresh kernel, which has launched two ranks before. `launch` is the
time until the last rank is in its function. The kernel's memory is what it grew by while the call
lasted, at its highest. Lines are those in the logs of all ranks, of those printed.

Beside them forks of bare torch train the same and end; nobody takes what they print and return. As
each of gloo's ranks joins each other, what a group takes grows with the square of the ranks.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

from timing import Kernel, arguments, interleave, median, seconds, table
from work import LINES, STEPS

if TYPE_CHECKING:
    from timing import Measurement

COUNTS = (16, 32, 64)
LIMIT = 300.0

CELL = f"""
    import json, resource, time
    import psutil, torch
    from notebook_accel import Accelerator, notebook_launcher

    def train():
        began = time.time()
        accelerator = Accelerator()
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in accelerator.progress(range({STEPS})):
            loss = model(torch.ones(4, 8)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({{"loss": loss}}, step=step)
            for line in range({LINES}):
                print("step", step, "line", line)
        return began

    def measure(count):
        before = psutil.Process().memory_info().rss
        start = time.time()
        run = notebook_launcher(train, num_processes=count, devices="cpu")
        taken = time.time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        kept = sum(len(run.logs(rank).splitlines()) for rank in range(count))
        assert len(run.metrics) == {STEPS}, len(run.metrics)
        found = {{
            "launch": max(run) - start, "seconds": taken, "bytes": peak - before, "kept": kept
        }}
        print("BENCHMARK", json.dumps(found))

    measure(2)
"""


BARE_CELL = f"""
    import json, sys, time
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import torch, work
    from torch import multiprocessing

    # What it imports would else be imported in each rank.
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())

    def measure(count):
        start = time.time()
        multiprocessing.start_processes(
            work.spawned_training,
            args=(count, work.free_port()),
            nprocs=count,
            start_method="fork",
        )
        print("BENCHMARK", json.dumps({{"seconds": time.time() - start}}))

    measure(2)
"""
CELLS = {"ours": CELL, "bare": BARE_CELL}


def measure(name: str) -> Measurement:
    """One call on so many ranks, in a kernel that has launched before."""
    contender, count = name.split()
    with Kernel.open() as kernel:
        kernel.run(dedent(CELLS[contender]))
        return kernel.run(f"measure({count})", limit=LIMIT)


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--ranks", type=int, nargs="*", help=f"how many, default {COUNTS}")
    options = parser.parse_args()
    counts = options.ranks or list(COUNTS[:1] if options.quick else COUNTS)
    repeats = 1 if options.quick else options.repeats
    names = [f"{contender} {count}" for count in counts for contender in CELLS]
    found = interleave(names, repeats, measure=measure)
    rows = []
    for count in counts:
        measurements = found[f"ours {count}"]
        grown = median(measurements, "bytes") or 0.0
        kept = {int(one["kept"]) for one in measurements}
        rows.append(
            {
                "ranks": count,
                "launch": seconds(median(measurements, "launch")),
                "call to return": seconds(median(measurements, "seconds")),
                "bare torch's": seconds(median(found[f"bare {count}"], "seconds")),
                "kernel's memory": f"{grown / 1e6:.1f} MB",
                "lines kept": f"{min(kept):,} of {count * STEPS * LINES:,}",
            }
        )
    print(f"\n{STEPS} steps of a tiny model; median of {repeats} kernels")
    print(table(rows))


if __name__ == "__main__":
    main()
