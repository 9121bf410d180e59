"""What the live panel costs while 8 ranks print 1,000 lines and log 100 metrics a second each.

A rank makes 100 steps a second, each of some arithmetic, ten lines and one metric. Its cost is the
processor time of a step with the panel over that without a view; the kernel's is the share of a
core that its process takes, and the agent's of the one between it and the ranks; the bytes are
those of all messages to the browser.
"""

from __future__ import annotations

from textwrap import dedent

from timing import Kernel, Measurement, arguments, interleave, median, table

RANKS = 8
VIEWS = ("widgets", "none")

OURS = """
    import json, os, time
    from notebook_accel import notebook_launcher

    sent = [0, 0]
    thread = get_ipython().kernel.iopub_thread
    plain = thread.send_multipart
    def counted(parts, *args, **kwargs):
        sent[0] += sum(len(part) for part in parts)
        sent[1] += 1
        return plain(parts, *args, **kwargs)
    thread.send_multipart = counted

    def work(seconds):
        import os, psutil, time
        from notebook_accel.rank.this_rank import current
        rank, agent = current(), psutil.Process(os.getppid())
        steps, start, busy = 0, time.monotonic(), time.process_time()
        while time.monotonic() < start + seconds:
            total = sum(number * number for number in range(2_000))
            for line in range(10):
                print(f"step {steps} line {line}: some text that a person might print", flush=True)
            rank.metric({f"m{steps % 20}": total / (steps + 1)}, steps)
            steps += 1
            time.sleep(max(0.0, start + steps / 100 - time.monotonic()))
        return steps, time.process_time() - busy, sum(agent.cpu_times()[:2])

    def launch(seconds, view):
        # The template is there, and the kernel has imported what it needs.
        notebook_launcher(work, (0.1,), num_processes=RANKS, devices="cpu", view=view)
        sent[:] = [0, 0]
        busy, start = time.process_time(), time.perf_counter()
        run = notebook_launcher(
            work, (seconds,), num_processes=RANKS, devices="cpu", view=view)
        taken, busy = time.perf_counter() - start, time.process_time() - busy
        steps = sum(steps for steps, _, _ in run)
        print("BENCHMARK", json.dumps({
            "steps": steps / taken / RANKS,
            "step": sum(cpu for _, cpu, _ in run) / steps,
            "kernel": busy / taken,
            "agent": max(cpu for _, _, cpu in run) / taken,
            "bytes": sent[0] / taken,
            "messages": sent[1] / taken,
        }))
"""


def measure(view: str, seconds: float) -> Measurement:
    """One run in a fresh kernel."""
    with Kernel.open() as kernel:
        kernel.run(dedent(OURS.replace("RANKS", str(RANKS))))
        try:
            return kernel.run(f"launch({seconds}, {view!r})", limit=seconds + 60)
        except (TimeoutError, RuntimeError) as error:
            return {"failed": str(error)[:80]}


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    options = parser.parse_args()
    seconds = 5.0 if options.quick else 15.0
    found = interleave(
        VIEWS, 1 if options.quick else options.repeats, measure=lambda view: measure(view, seconds)
    )
    bare = median(found["none"], "step")
    print(table([_row(view, found[view], bare) for view in VIEWS]))


def _row(view: str, measurements: list[Measurement], bare: float | None) -> dict[str, object]:
    names = ("step", "steps", "kernel", "agent", "bytes", "messages")
    values = {name: median(measurements, name) or 0.0 for name in names}
    return {
        "view": view,
        "steps/s a rank": f"{values['steps']:.0f}",
        "processor time of a step": f"{values['step'] * 1e3:.2f} ms",
        "over no view": f"{values['step'] / bare:.3f}" if bare else "-",
        "kernel": f"{values['kernel']:.1%} of a core",
        "agent": f"{values['agent']:.1%} of a core",
        "to the browser": f"{values['bytes'] / 1e3:,.0f} KB/s in {values['messages']:.0f} messages",
        "failed": sum("failed" in one for one in measurements),
    }


if __name__ == "__main__":
    main()
