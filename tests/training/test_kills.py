"""A rank that is killed at random instants of a training that saves every third batch.

Its windows have two batches, so that half of the checkpoints are saved within one.

Each time the training is started anew, with the same line, until it reaches its end; on the way it
may be killed again. Whatever was killed, and whenever: a checkpoint loads, none is broken, and the
losses of all attempts together are those of a training that nobody interrupted, to the bit.

``make test-kills`` kills each case at fifty instants of its own.
"""

import os
import random
import shutil
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch

from notebook_accel import GradScalerKwargs
from tests.training.harness import RankError, run_ranks, skip_unless_it_runs
from tests.training.meshes import LAYOUTS, accelerator_for, data, loss_of, make

# layout (None: DDP), precision, whether checkpoints are written in the background
CASES = {
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
INSTANTS = int(os.environ.get("NOTEBOOK_ACCEL_TEST_ROUNDS", "1"))
# Of layouts with and without a loss scale those with it: the rest takes the same way.
SHORT = ["ddp, fp16", "ddp, async", "fsdp2, fp16", "fsdp2, async", "1F1B"]
EPOCHS, SAMPLES = 2, 12 if INSTANTS == 1 else 24
# Of fp16, so that it moves within the few steps here.
SCALE = GradScalerKwargs(init_scale=2.0**20, growth_interval=3)
# A kill may come after the end, where the machine was slow as the time was measured.
ATTEMPTS_A_KILL = 5
# The checkpoint of a rank that was killed as it was to add its file is not the newest whole one.
UNFINISHED = "a rank ended before it had written its random_states_1.pkl"
KILLED = f"ended with status {int(signal.SIGKILL)},"  # how the harness says it


def train(folder, name, victim, seconds):
    """Train on one rank; the victim is killed after ``seconds`` (0: nobody). Times the loop."""
    layout, precision, is_async = CASES[name]
    accelerator = accelerator_for(
        layout, gradient_accumulation_steps=2, mixed_precision=precision, kwargs_handlers=[SCALE]
    )
    model, optimizer = make({})
    size = 2 // LAYOUTS[layout][1]  # as many batches under each layout
    loader = torch.utils.data.DataLoader(data(SAMPLES), batch_size=size, shuffle=True)
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
                if _is_saved(batch):
                    accelerator.save_state(async_save=is_async)
        accelerator.wait_for_checkpoint()
    return time.monotonic() - began


def _is_saved(batch):
    return batch % 3 == 1


def _log(folder, accelerator):
    """Lines that outlive a kill."""
    path = Path(folder, f"losses_{accelerator.process_index}")
    return path.open("a", buffering=1)


def _kill_later(seconds):
    parent = os.getpid()
    if os.fork():
        return
    time.sleep(seconds)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os._exit(0)


@pytest.mark.long
@pytest.mark.timeout(300 * INSTANTS)
@pytest.mark.parametrize("name", SHORT if INSTANTS == 1 else CASES)
def test_a_killed_training_goes_on_as_if_nothing_had_been(name, tmp_path):
    skip_unless_it_runs(name)
    seed = 7 if INSTANTS == 1 else random.randrange(1_000_000)
    print("seed", seed)
    dice, ranks = random.Random(seed), LAYOUTS[CASES[name][0]][0]
    (tmp_path / "whole").mkdir()
    whole_seconds = max(run_ranks(train, ranks, str(tmp_path / "whole"), name, 0, 0.0))
    expected = [_losses(tmp_path / "whole", rank) for rank in range(ranks)]
    assert [len(losses) for losses in expected] == [SAMPLES] * ranks
    kills = 0
    for number in range(INSTANTS * ATTEMPTS_A_KILL):
        if kills == INSTANTS:
            break
        folder = tmp_path / str(number)
        folder.mkdir()
        killed = []
        while True:
            # One that goes on may be killed again: as it loads, say.
            may_die = kills + len(killed) < INSTANTS
            seconds = dice.uniform(0.001, whole_seconds) if may_die else 0.0
            try:
                call = (str(folder), name, dice.randrange(ranks), seconds)
                took = max(run_ranks(train, ranks, *call))
                break
            except RankError as error:
                if KILLED not in str(error):
                    raise
                killed.append(seconds)
        kills += len(killed)
        if not killed:
            whole_seconds = min(whole_seconds, took)
        for rank in range(ranks):
            found = _losses(folder, rank)
            # Killed after a step, and before it wrote that down; rank 0, which under DDP has all
            # and waits for nobody, saved it.
            may_lack = rank and CASES[name][0] is None
            lacking = {step for step in expected[rank] if may_lack and step not in found}
            assert len(lacking) <= len(killed)
            assert all(_is_saved(int(step.split(".")[1])) for step in lacking)
            found |= {step: expected[rank][step] for step in lacking}
            assert found == expected[rank], f"rank {rank}, killed after {killed} s"
        shutil.rmtree(folder)
    assert kills == INSTANTS


def _losses(folder, rank):
    """The losses of each step, in all attempts together; a checkpoint that was broken fails."""
    losses = {}
    for line in (folder / f"losses_{rank}").read_text().splitlines():
        step, _, value = line.partition(" ")
        assert step != "broken", line
        losses.setdefault(step, set()).add(value)
    return losses
