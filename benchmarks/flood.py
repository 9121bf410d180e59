"""Two ranks print as fast as they can.

Ours: lines a second until the call has returned and all lines are on disk, where they are counted
and their order is checked. accelerate: lines a second that reach the notebook, fewer of them
since it is slow; a line that arrived broken counts as lost.
"""

from __future__ import annotations

import re
from itertools import pairwise
from textwrap import dedent

from timing import Kernel, Measurement, arguments, interleave, median, table

LIMIT = 120.0

OURS = """
    import json, time
    from notebook_accel import notebook_launcher

    def flood(count):
        import os
        rank = os.environ["RANK"]
        for number in range(count):
            print(f"rank={rank} line={number} with some text that a person might print")

    def launch(count):
        start = time.perf_counter()
        run = notebook_launcher(flood, args=(count,), num_processes=2)
        taken = time.perf_counter() - start
        texts = [run.logs(rank=rank) for rank in (0, 1)]
        found = [[line.split()[:2] for line in text.splitlines()] for text in texts]
        wanted = [[[f"rank={rank}", f"line={n}"] for n in range(count)] for rank in (0, 1)]
        lines = sum(map(len, found))
        print("BENCHMARK", json.dumps(
            {"seconds": taken, "lines": lines, "lost": 2 * count - lines,
             "disorder": sum(a != b for f, w in zip(found, wanted) for a, b in zip(f, w))}))
    launch(10)
"""

ACCELERATE = """
    import json, os, socket, time
    import torch
    from accelerate import notebook_launcher

    def flood(count):
        rank = os.environ["RANK"]
        for number in range(count):
            print(f"rank={rank} line={number} with some text that a person might print")

    def launch(count):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        start = time.perf_counter()
        notebook_launcher(flood, args=(count,), num_processes=2, use_port=str(port))
        taken = time.perf_counter() - start
        time.sleep(2)  # what is still on its way may arrive
        print("\\nBENCHMARK", json.dumps({"seconds": taken}))
"""


def measure_ours(count: int) -> Measurement:
    """Our launcher: what is on disk once the call has returned."""
    with Kernel.open() as kernel:
        kernel.run(dedent(OURS), limit=LIMIT)
        return kernel.run(f"launch({count})", limit=LIMIT)


def measure_accelerate(count: int) -> Measurement:
    """accelerate's: what has reached the notebook once the cell has ended."""
    with Kernel.open() as kernel:
        kernel.run(dedent(ACCELERATE), limit=LIMIT)
        found = kernel.run(f"launch({count})", limit=LIMIT)
    lines = re.findall(
        r"rank=(\d) line=(\d+) with some text that a person might print\n", found["text"]
    )
    numbers = [[int(n) for rank, n in lines if rank == which] for which in "01"]
    disorder = sum(b != a + 1 for got in numbers for a, b in pairwise(got))
    return {
        "seconds": found["seconds"],
        "lines": len(lines),
        "lost": 2 * count - len(lines),
        "disorder": disorder,
    }


def measure(name: str, lines: int, peer_lines: int) -> Measurement:
    """One contender, or why it could not be measured."""
    try:
        found = measure_ours(lines) if name == "notebook_accel" else measure_accelerate(peer_lines)
    except TimeoutError:
        return {"failed": f"did not end in {LIMIT:.0f} s"}
    except RuntimeError as error:
        return {"failed": str(error)[:80]}
    return {**found, "rate": found["lines"] / found["seconds"]}


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--lines", type=int, default=100_000, help="that each rank prints")
    parser.add_argument("--peer-lines", type=int, default=2_000, help="the same for the peer")
    options = parser.parse_args()
    lines = min(options.lines, 10_000) if options.quick else options.lines
    counts = {"notebook_accel": lines, "accelerate": options.peer_lines}
    found = interleave(
        list(counts),
        1 if options.quick else options.repeats,
        measure=lambda name: measure(name, lines, options.peer_lines),
    )
    print(table([_row(name, found[name], counts[name]) for name in counts]))


def _row(name: str, measurements: list[Measurement], count: int) -> dict[str, object]:
    rate = median(measurements, "rate")
    return {
        "contender": name,
        "lines a rank": count,
        "lines/s": f"{rate:,.0f}" if rate else "-",
        "lost or broken": max((m["lost"] for m in measurements if "lost" in m), default="-"),
        "out of order": max((m["disorder"] for m in measurements if "lost" in m), default="-"),
        "never ended": sum("failed" in m for m in measurements),
    }


if __name__ == "__main__":
    main()
