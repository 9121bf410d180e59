"""Kill -9 of a rank at random instants of a training that saves every second step.

Each time the training is started anew, with the same line, until it reaches its end. Whatever was
killed, and whenever: a checkpoint loads, none is broken, and the losses of all attempts together
are those of a training that nobody interrupted, to the bit.

``python -m tests.kills --instants 50`` prints what it saw; a short version is part of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.training.harness import RankError, run_ranks
from tests.training.meshes import accelerator_for, data, loss_of, make

__all__ = ["CASES", "Report", "main", "run_case"]

# strategy (None: DDP), whether checkpoints are written in the background
CASES: dict[str, tuple[str | None, bool]] = {
    "ddp": (None, False),
    "ddp, async": (None, True),
    "fsdp2": ("fsdp, blocks", False),
    "fsdp2, async": ("fsdp, blocks", True),
}
EPOCHS, SAMPLES, RANKS = 2, 24, 2


class Report(dict[str, Any]):
    """What was seen of one case: kills, attempts, checkpoints passed over, losses that differ."""


def train(folder: str, mesh: str | None, is_async: bool, victim: int, seconds: float) -> float:
    """One attempt, on one rank; the victim is killed after so many seconds (0: nobody is).

    Returns:
        how long the loop took.
    """
    accelerator = accelerator_for(mesh, gradient_accumulation_steps=2)
    model, optimizer = make({})
    loader = torch.utils.data.DataLoader(data(SAMPLES), batch_size=1, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.wait_for_everyone()
    began = time.monotonic()
    if seconds and accelerator.process_index == victim:
        _kill_later(seconds)
    with warnings.catch_warnings(record=True) as caught, _log(folder, accelerator) as log:
        warnings.simplefilter("always")
        start = accelerator.resume_or_start(f"{folder}/checkpoints")
        broken = [str(one.message) for one in caught if "passes over" in str(one.message)]
        log.writelines(f"broken {line}\n" for line in broken)
        for epoch in range(start.epoch, EPOCHS):
            begin = start.batch if epoch == start.epoch else 0
            for batch, (inputs, targets) in enumerate(loader, begin):
                with accelerator.accumulate(model):
                    loss = loss_of(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                log.write(f"{epoch}.{batch} {loss.item().hex()}\n")
                if batch % 2:
                    accelerator.save_state(async_save=is_async)
        accelerator.wait_for_checkpoint()
    return time.monotonic() - began


def _log(folder: str, accelerator: Any) -> Any:
    """Lines that outlive a kill."""
    path = Path(folder, f"losses_{accelerator.process_index}")
    return path.open("a", buffering=1)


def _kill_later(seconds: float) -> None:
    parent = os.getpid()
    if os.fork():
        return
    time.sleep(seconds)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os._exit(0)


def run_case(name: str, instants: int, seed: int, root: Path) -> Report:
    """Interrupt one training so often, each time as a new one."""
    mesh, is_async = CASES[name]
    dice = random.Random(seed)
    report = Report(kills=0, attempts=0, broken=[], differing=[], num_losses=0)
    (root / "whole").mkdir(parents=True)
    whole_seconds = max(run_ranks(train, RANKS, str(root / "whole"), mesh, is_async, 0, 0.0))
    expected = [_losses(root / "whole", rank)[0] for rank in range(RANKS)]
    for number in range(instants):
        folder = root / str(number)
        folder.mkdir()
        seconds = dice.uniform(0.001, whole_seconds)
        with contextlib.suppress(RankError):
            run_ranks(train, RANKS, str(folder), mesh, is_async, dice.randrange(RANKS), seconds)
        ends = [_losses(folder, rank) for rank in range(RANKS)]
        report["kills"] += any(set(end[0]) != set(expected[0]) for end in ends)
        run_ranks(train, RANKS, str(folder), mesh, is_async, 0, 0.0)
        report["attempts"] += 2
        for rank in range(RANKS):
            losses, wrong = _losses(folder, rank)
            report["broken"] += [line for line in wrong if line.startswith("broken")]
            report["num_losses"] += len(losses)
            if losses != expected[rank]:
                report["differing"].append((number, rank, seconds))
        shutil.rmtree(folder)
    return report


def _losses(folder: Path, rank: int) -> tuple[dict[str, set[str]], list[str]]:
    """The losses that were seen at each step, and the lines that are none."""
    path = folder / f"losses_{rank}"
    losses: dict[str, set[str]] = {}
    wrong = []
    for line in path.read_text().splitlines() if path.exists() else ():
        step, _, value = line.partition(" ")
        if step == "broken":
            wrong.append(line)
        else:
            losses.setdefault(step, set()).add(value)
    return losses, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--instants", type=int, default=50, help="kills of each case")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    bad = 0
    for name in CASES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kills-") as root:
            report = run_case(name, options.instants, seed, Path(root))
        bad += len(report["broken"]) + len(report["differing"])
        print(
            f"{name:13} {report['kills']} of {options.instants} killed before the end, "
            f"{report['num_losses']} losses, {len(report['differing'])} curves differ, "
            f"{len(report['broken'])} checkpoints broken, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        for line in (*report["broken"], *map(str, report["differing"])):
            print("WRONG", line)
    return 1 if bad else 0


if __name__ == "__main__":
    # Ranks load the module by its name, which is not that of a script.
    from tests import kills  # noqa: PLW0406

    sys.exit(kills.main())
