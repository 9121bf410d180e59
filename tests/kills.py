"""Kill -9 of a rank at random instants of a training that saves every third batch.

Its windows have two batches, so that half of the checkpoints are saved within one.

Each time the training is started anew, with the same line, until it reaches its end; on the way it
may be killed again. Whatever was killed, and whenever: a checkpoint loads, none is broken, and the
losses of all attempts together are those of a training that nobody interrupted, to the bit.

``python -m tests.kills --instants 50`` prints what it saw; a short version is part of the tests.
"""

import argparse
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

from notebook_accel import GradScalerKwargs
from tests.training.harness import RankError, run_ranks
from tests.training.meshes import LAYOUTS, accelerator_for, data, loss_of, make

# layout (None: DDP), precision, whether checkpoints are written in the background
CASES: dict[str, tuple[str | None, str, bool]] = {
    "ddp": (None, "no", False),
    "ddp, fp16": (None, "fp16", False),
    "ddp, async": (None, "no", True),
    "fsdp2": ("fsdp, blocks", "no", False),
    "fsdp2, fp16": ("fsdp, blocks", "fp16", False),
    "fsdp2, async": ("fsdp, blocks", "no", True),
    "tensor": ("tensor", "no", False),
    "1F1B": ("1F1B", "no", False),
    "fsdp2 x tensor": ("fsdp x tensor", "no", False),
}
EPOCHS, SAMPLES = 2, 24
# Of fp16, so that it moves within the few steps here.
SCALE = GradScalerKwargs(init_scale=2.0**20, growth_interval=3)
# A kill may come after the end, where the machine was slow as the time was measured.
ATTEMPTS_A_KILL = 5
# The checkpoint of a rank that was killed as it was to add its file is not the newest whole one.
UNFINISHED = "a rank ended before it had written its random_states_1.pkl"
KILLED = f"ended with status {int(signal.SIGKILL)},"  # how the harness says it


class Report(dict[str, Any]):
    """What was seen of one case: kills, attempts, trainings, broken checkpoints, other losses."""


def train(folder: str, name: str, samples: int, victim: int, seconds: float) -> float:
    """Train on one rank; the victim is killed after ``seconds`` (0: nobody). Times the loop."""
    layout, precision, is_async = CASES[name]
    accelerator = accelerator_for(
        layout, gradient_accumulation_steps=2, mixed_precision=precision, kwargs_handlers=[SCALE]
    )
    model, optimizer = make({})
    size = 2 // LAYOUTS[layout][1]  # as many batches under each layout
    loader = torch.utils.data.DataLoader(data(samples), batch_size=size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.wait_for_everyone()
    began = time.monotonic()
    if seconds and accelerator.process_index == victim:
        _kill_later(seconds)
    with warnings.catch_warnings(record=True) as caught, _log(folder, accelerator) as log:
        warnings.simplefilter("always")
        start = accelerator.resume_or_start(f"{folder}/checkpoints")
        told = [str(one.message) for one in caught if "passes over" in str(one.message)]
        broken = [line for line in told if UNFINISHED not in line]
        log.writelines(f"broken {line}\n" for line in broken)
        for epoch in range(start.epoch, EPOCHS):
            begin = start.batch if epoch == start.epoch else 0
            for batch, (inputs, targets) in enumerate(loader, begin):
                with accelerator.accumulate(model):
                    loss = accelerator.forward_backward(model, inputs, targets, loss_of)
                    optimizer.step()
                    optimizer.zero_grad()
                scale = accelerator.scaler.get_scale() if accelerator.scaler else 1.0
                log.write(f"{epoch}.{batch} {loss.item().hex()} {scale}\n")
                if batch % 3 == 1:
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


def run_case(name: str, instants: int, seed: int, root: Path, *, samples: int = SAMPLES) -> Report:
    """Interrupt trainings by ``instants`` kills, each until it has reached its end."""
    ranks = LAYOUTS[CASES[name][0]][0]
    dice = random.Random(seed)
    report = Report(kills=0, attempts=0, trainings=0, broken=[], differing=[], num_losses=0)
    (root / "whole").mkdir(parents=True)
    whole_seconds = max(run_ranks(train, ranks, str(root / "whole"), name, samples, 0, 0.0))
    expected = [_losses(root / "whole", rank)[0] for rank in range(ranks)]
    for number in range(instants * ATTEMPTS_A_KILL):
        if report["kills"] == instants:
            break
        folder = root / str(number)
        folder.mkdir()
        report["trainings"] += 1
        killed: list[float] = []
        while True:
            # One that goes on may be killed again: as it loads, say.
            may_die = report["kills"] < instants
            seconds = dice.uniform(0.001, whole_seconds) if may_die else 0.0
            report["attempts"] += 1
            call = (str(folder), name, samples, dice.randrange(ranks), seconds)
            try:
                took = max(run_ranks(train, ranks, *call))
                break
            except RankError as error:
                if KILLED not in str(error):
                    raise
                report["kills"] += 1
                killed.append(seconds)
        if not killed:
            whole_seconds = min(whole_seconds, took)
        for rank in range(ranks):
            losses, wrong = _losses(folder, rank)
            report["broken"] += [line for line in wrong if line.startswith("broken")]
            report["num_losses"] += len(losses)
            if losses != expected[rank]:
                report["differing"].append((number, rank, killed))
        shutil.rmtree(folder)
    return report


def _losses(folder: Path, rank: int) -> tuple[dict[str, set[str]], list[str]]:
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
        bad += options.instants - report["kills"]
        print(
            f"{name:14} {report['kills']} of {options.instants} killed before the end, "
            f"{report['trainings']} trainings, "
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
