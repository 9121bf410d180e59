"""A cell on warm workers, from sent to idle: ours beside ipyparallel, in one kernel.

Both have two workers in the same kernel and run the same cells in turn, so that what the machine
does meanwhile meets both alike; and so does the kernel by itself, which is the floor. The time is
that of the page: from the sent request until the kernel is idle, all outputs included.
"""

from __future__ import annotations

import time
from textwrap import dedent

from timing import Kernel, Measurement, arguments, interleave, median, report, table

CELLS = {
    "an expression": "x = 1 + 1\nx",
    "a print": "print('hello')",
    "names of the notebook": "scaled(3)",
}
MAGICS = {"ours": "%%accelerate\n", "ipyparallel": "%%px\n", "kernel": ""}
SETUP = {
    "ours": """
        %load_ext notebook_accel
        def scaled(value):
            return value * factor
        factor = 7
    """,
    # Its engines have nothing of the notebook's own accord.
    "ipyparallel": """
        import ipyparallel
        cluster = ipyparallel.Cluster(n=2, log_level=40)
        engines = cluster.start_and_connect_sync(activate=True)
        engines[:].push({"scaled": lambda value: value * 7}, block=True)
    """,
}


def measure_kernel(repeats: int) -> Measurement:
    """Medians of all cells in one kernel, in seconds, by contender and cell."""
    taken: dict[str, list[float]] = {f"{name}, {cell}": [] for name in MAGICS for cell in CELLS}
    with Kernel.open() as kernel:
        for setup in SETUP.values():
            kernel.run(dedent(setup))
        kernel.run("%%accelerate -n 2\n1")
        for repeat in range(repeats + 3):
            for cell, code in CELLS.items():
                for name, magic in MAGICS.items():
                    start = time.perf_counter()
                    kernel.run(f"{magic}{code}")
                    # The first ones of each import what they need.
                    if repeat >= 3:
                        taken[f"{name}, {cell}"].append(time.perf_counter() - start)
        kernel.run("cluster.stop_cluster_sync()")
    return {key: sorted(values)[len(values) // 2] for key, values in taken.items()}


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    options = parser.parse_args()
    if options.one:
        report(measure_kernel(30 if options.quick else 60))
        return
    extra = ["--quick"] if options.quick else []
    found = interleave(["both"], 1 if options.quick else options.repeats, extra)["both"]
    rows = []
    for cell in CELLS:
        ours, peer, alone = (median(found, f"{name}, {cell}") for name in MAGICS)
        rows.append(
            {
                "cell": cell,
                "notebook_accel": _milliseconds(ours),
                "ipyparallel": _milliseconds(peer),
                "the kernel alone": _milliseconds(alone),
                "ratio": f"{ours / peer:.2f}" if ours and peer else "-",
            }
        )
    print("\nA cell on 2 warm workers, sent to idle; medians")
    print(table(rows))
    for failed in {m["failed"] for m in found if "failed" in m}:
        print(f"failed: {failed}")


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
