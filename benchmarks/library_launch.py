"""Launches of functions that use libraries, beside Accelerate, which forks the notebook's kernel.

Each round has a fresh IPython kernel for each contender, import cell and function, in turn: a cell
that imports transformers, or that and pandas, scikit-learn, Matplotlib and peft (datasets and
evaluate too, where they are installed); a function that builds a tiny GPT2 and goes one step
backward, or that trains it for two steps by transformers' Trainer. Measured are, from the first
cell sent to the first result, the whole of "Run all"; the first launch in it; launches after it, of
2 and of 8 ranks; and the memory (PSS) of 8 ranks beside the notebook: of all processes together
while the ranks wait, less what there was before the launch ("ranks"), or less the kernel ("all").
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from textwrap import dedent
from threading import Thread

import psutil
from timing import Kernel, Measurement, arguments, interleave, median, seconds, table

OURS, ACCELERATE = "notebook_accel", "accelerate"
RANKS = 8
HOLD_SECONDS = 6.0

TRANSFORMERS = """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
"""
MANY = """
    import torch
    import matplotlib.pyplot as plt
    import numpy as np
    import pandas as pd
    from peft import LoraConfig, get_peft_model
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
"""
for _name, _line in (
    ("datasets", "from datasets import Dataset, load_dataset"),
    ("evaluate", "import evaluate"),
):
    if importlib.util.find_spec(_name):
        MANY += f"    {_line}\n"
CELLS = {"transformers": TRANSFORMERS, "many": MANY}

# Accelerate's own launcher would take a CPU for a mistake of the rank's, unless told.
LAUNCHERS = {
    OURS: """
    from notebook_accel import notebook_launcher

    def launch(function, number=2):
        notebook_launcher(function, num_processes=number)
    """,
    ACCELERATE: f"""
    import os, sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from accelerate import notebook_launcher
    from work import free_port

    os.environ["ACCELERATE_USE_CPU"] = "true"

    def launch(function, number=2):
        notebook_launcher(function, num_processes=number, use_port=str(free_port()))
    """,
}
FUNCTIONS = (
    """
    import time

    def small():
        shape = dict(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))

    def gpt2():
        tokens = torch.arange(8)[None]
        small()(tokens, labels=tokens).loss.backward()

    def trainer():
        import tempfile

        rows = [dict(input_ids=torch.arange(8), labels=torch.arange(8)) for _ in range(16)]
        with tempfile.TemporaryDirectory() as folder:
            options = TrainingArguments(
                folder, max_steps=2, report_to=[], save_strategy="no", use_cpu=True,
                per_device_train_batch_size=2, disable_tqdm=True, logging_strategy="no",
                ddp_backend="gloo",
            )
            Trainer(model=small(), args=options, train_dataset=rows).train()

    def held():
        gpt2()
        time.sleep(HOLD_SECONDS)
"""
    f"    HOLD_SECONDS = {HOLD_SECONDS}\n"
)


def run_all(kernel: Kernel, name: str, cells: str, function: str) -> Measurement:
    """Send the cells of a notebook at once; how long all took, and the launch at its end."""
    begin = time.perf_counter()
    # The launcher's import stands in the first cell, with the others.
    kernel.run(dedent(LAUNCHERS[name]) + dedent(cells))
    kernel.run(dedent(FUNCTIONS))
    first = kernel.run(f"launch({function})")["wall"]
    return {"all": time.perf_counter() - begin, "first": first}


def later(kernel: Kernel, function: str, number: int, times: int) -> float:
    """The median time of further launches."""
    walls = sorted(kernel.run(f"launch({function}, {number})")["wall"] for _ in range(times))
    return walls[len(walls) // 2]


def memory(kernel: Kernel) -> Measurement:
    """MB of memory that 8 ranks add, which have built the model and wait."""
    time.sleep(3)  # what the launches before have started has ended, or is ready
    root = psutil.Process(int(kernel.run("import os; print(os.getpid())")["text"]))
    before = total_pss(root)
    launching = Thread(target=kernel.run, args=(f"launch(held, {RANKS})",))
    launching.start()
    time.sleep(HOLD_SECONDS * 0.75)
    during, of_kernel = total_pss(root), before["kernel"]
    launching.join()
    return {"ranks": during["all"] - before["all"], "beside": during["all"] - of_kernel}


def total_pss(root: psutil.Process) -> dict[str, float]:
    """MB of a process and all below it; and of the process, with all that it shares, alone."""
    pss = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            pss += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return {"all": pss / 1e6, "kernel": root.memory_full_info().pss / 1e6}


def measure(contender: str) -> Measurement:
    """All figures of one contender in one kernel a function."""
    name, cells = contender.split(", ")
    with Kernel.open() as kernel:
        time.sleep(1)  # a person reads, and types
        found = run_all(kernel, name, CELLS[cells], "gpt2")
        found["later"] = later(kernel, "gpt2", 2, 5)
        found["eight"] = later(kernel, "gpt2", RANKS, 3)
        found |= memory(kernel)
    with Kernel.open() as kernel:
        time.sleep(1)
        trained = run_all(kernel, name, CELLS[cells], "trainer")
        found |= {f"trainer, {key}": value for key, value in trained.items()}
        found["trainer, later"] = later(kernel, "trainer", 2, 5)
    return found


ROWS = {
    "all": "Run all, GPT2 function",
    "first": "the first launch in it",
    "later": "later launches, 2 ranks",
    "eight": f"later launches, {RANKS} ranks",
    "trainer, all": "Run all, Trainer",
    "trainer, first": "the first launch in it",
    "trainer, later": "later launches, 2 ranks",
    "ranks": f"memory that {RANKS} ranks add, MB",
    "beside": "memory beside the kernel, MB",
}


def main() -> None:
    options = arguments(__doc__, repeats=5).parse_args()
    kinds = list(CELLS)[: 1 if options.quick else None]
    names = [f"{name}, {cells}" for cells in kinds for name in (OURS, ACCELERATE)]
    repeats = 1 if options.quick else options.repeats
    found = interleave(names, repeats, measure=measure)
    for cells in kinds:
        print(f"\nA notebook that imports {cells}; median of {repeats} rounds")
        print(table([_row(key, found, cells) for key in ROWS]))


def _row(key: str, found: dict[str, list[Measurement]], cells: str) -> dict[str, str]:
    ours, theirs = (median(found[f"{name}, {cells}"], key) for name in (OURS, ACCELERATE))
    ratios = [
        a[key] / b[key]
        for a, b in zip(found[f"{OURS}, {cells}"], found[f"{ACCELERATE}, {cells}"], strict=True)
    ]
    is_memory = "MB" in ROWS[key]
    shown = [f"{v:.0f}" if is_memory and v else seconds(v) for v in (ours, theirs)]
    return {
        "what": ROWS[key],
        OURS: shown[0],
        ACCELERATE: shown[1],
        "ratio": f"{median([{'r': r} for r in ratios], 'r'):.2f}",
        "range": f"{min(ratios):.2f} to {max(ratios):.2f}",
    }


if __name__ == "__main__":
    main()
