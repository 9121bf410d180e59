"""What 16, 32 and 64 ranks of one machine take: their time, and their kernel's memory.

Each rank builds an Accelerator, trains a tiny model on the CPU and, at each step, prints, logs and
moves a bar. Each count has a fresh kernel, which has launched two ranks before. `launch` is the
time until the last rank is in its function. The kernel's memory is what it grew by while the call
lasted, at its highest. Lines are those in the logs of all ranks, of those printed.
"""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

from timing import Kernel, arguments, interleave, median, seconds, table

if TYPE_CHECKING:
    from timing import Measurement

COUNTS = (16, 32, 64)
STEPS = 20
LINES = 10
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


def measure(name: str) -> Measurement:
    """One call on so many ranks, in a kernel that has launched before."""
    with Kernel.open() as kernel:
        kernel.run(dedent(CELL))
        return kernel.run(f"measure({name})", limit=LIMIT)


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--ranks", type=int, nargs="*", help=f"how many, default {COUNTS}")
    options = parser.parse_args()
    counts = options.ranks or list(COUNTS[:1] if options.quick else COUNTS)
    repeats = 1 if options.quick else options.repeats
    found = interleave([str(count) for count in counts], repeats, measure=measure)
    rows = []
    for name, measurements in found.items():
        count, grown = int(name), median(measurements, "bytes") or 0.0
        kept = {int(one["kept"]) for one in measurements}
        rows.append(
            {
                "ranks": name,
                "launch": seconds(median(measurements, "launch")),
                "call to return": seconds(median(measurements, "seconds")),
                "kernel's memory": f"{grown / 1e6:.1f} MB",
                "lines kept": f"{min(kept):,} of {count * STEPS * LINES:,}",
            }
        )
    print(f"\n{STEPS} steps of a tiny model; median of {repeats} kernels")
    print(table(rows))


if __name__ == "__main__":
    main()
