"""``notebook-accel test``: trains a small model and checks the results.

    test --by torchrun, or by --engine--> check_training on every rank --> one line per check

Under torchrun, the ranks run this module as a script. A check returns whether it passed, and a text
about what it saw. An exception in a check ends the run with its traceback.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from notebook_accel.cli.launch import launch_parser, run_typed
from notebook_accel.cli.options import resolve_options
from notebook_accel.config.engines import ENGINES
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.launcher import launch
from notebook_accel.launch.view.plain import PlainView
from notebook_accel.training.accelerator import Accelerator
from notebook_accel.training.collectives import broadcast, broadcast_object_list, gather_object
from notebook_accel.training.processes.random_numbers import set_seed
from notebook_accel.training.settings.handlers import DataLoaderConfiguration

_NUM_STEPS = 12
_WIDTH = 8
# How far the last loss may be from that of one process without mixed precision.
_TOLERANCE = 0.05


def test(arguments: Sequence[str]) -> int:
    """``notebook-accel test``, with ``launch``'s options: 0 if all checks passed, else 1."""

    parser = launch_parser()
    parser.prog, parser.usage = "notebook-accel test", "notebook-accel test [options of launch]"
    parser.description = "Train a small model as it is configured, with a verdict a check."
    if unwanted := {"-h", "--help"} & set(arguments):
        parser.parse_args([*unwanted])
    typed = parser.parse_args([*arguments, "--module", __name__])
    config, machines, notices = resolve_options(typed)
    if typed.engine is None and ENGINES[config.engine].runs_scripts:
        status = run_typed(typed, config, machines, notices)
    else:
        view, lines = PlainView(), tuple(notices)
        request = LaunchRequest(function=check_training, config=config, view=view, notices=lines)
        status = 0 if all(launch(request).results) else 1
    print("notebook-accel test: " + ("all checks passed" if status == 0 else "FAILED, see above"))
    return status


def check_training() -> bool:
    """Run all checks (collective); rank 0 prints a line for each. True if they passed on all."""

    # Batches are those of one process, divided.
    config = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(dataloader_config=config, gradient_accumulation_steps=1)
    passed = []
    for name, check in _CHECKS.items():
        is_right, text = check(accelerator)
        wrong = [rank for rank, right in enumerate(gather_object([is_right])) if not right]
        passed.append(not wrong)
        said = f" (wrong on the ranks {', '.join(map(str, wrong))})" if wrong else ""
        accelerator.print(f"{'✗' if wrong else '✓'} {name}: {text}{said}", flush=True)
    accelerator.end_training()
    return all(passed)


# ---- the checks: each gives whether this rank saw what is right, and what it saw -----------


def _ranks(accelerator: Accelerator) -> tuple[bool, str]:

    here = gather_object([accelerator.process_index])  # also from ranks that share their samples
    number = accelerator.num_processes
    text = f"{len(here)} of {number} met, on {accelerator.device.type}"
    return here == [*range(number)], f"{text}, {accelerator.distributed_type.value}"


def _collectives(accelerator: Accelerator) -> tuple[bool, str]:

    mine = torch.tensor([accelerator.process_index + 1.0], device=accelerator.device)
    total = accelerator.reduce(mine, reduction="sum").item()
    # Ranks that share their samples count once.
    seen = accelerator.gather(mine).tolist()
    first = broadcast(mine.clone()).item()
    return (total, first) == (sum(seen), 1.0), f"gather {len(seen)}, reduce {total:g}, broadcast"


def _data(accelerator: Accelerator) -> tuple[bool, str]:

    size = 10 * accelerator.num_processes + 1
    data: Any = torch.arange(size)
    batch_size = 2 * accelerator.num_processes
    loader = torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True)
    batches = [accelerator.gather_for_metrics(batch) for batch in accelerator.prepare(loader)]
    seen = torch.cat(batches).tolist()
    return sorted(seen) == [*range(size)], f"{len(seen)} of {size} samples came, each once"


def _training(accelerator: Accelerator) -> tuple[bool, str]:
    model, optimizer, loader = _parts(accelerator)
    # The same model as one process trains it.
    alone, its_optimizer, all_batches = _parts(accelerator)
    wanted = []
    for inputs, targets in all_batches:
        loss: Any = mse_loss(alone(inputs), targets)
        loss.backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
        wanted.append(loss.item())
    prepared = accelerator.prepare(model, optimizer, loader)
    losses = [accelerator.gather(loss).mean().item() for loss in _steps(accelerator, *prepared)]
    text = f"loss {losses[0]:.4f} to {losses[-1]:.4f}, of one process {wanted[-1]:.4f}"
    is_near = abs(losses[-1] - wanted[-1]) <= _TOLERANCE * wanted[0]
    return losses[-1] < losses[0] and is_near, f"{text}, precision {accelerator.mixed_precision}"


def _checkpoint(accelerator: Accelerator) -> tuple[bool, str]:

    # DeepSpeed trains one model at a time.
    accelerator.free_memory()
    model, optimizer, loader = accelerator.prepare(*_parts(accelerator))
    folder = [tempfile.mkdtemp(prefix="notebook-accel-") if accelerator.is_main_process else ""]
    broadcast_object_list(folder)
    try:
        before = accelerator.get_state_dict(model)
        kept = {name: weight.clone() for name, weight in before.items()}
        accelerator.save_state(folder[0])
        for _ in _steps(accelerator, model, optimizer, loader):
            pass
        accelerator.load_state(folder[0])
        after = accelerator.get_state_dict(model)
        is_same = all(torch.equal(kept[name], after[name]) for name in kept)
    finally:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(folder[0], ignore_errors=True)
    return is_same, "what was saved was loaded again"


_CHECKS: dict[str, Callable[[Accelerator], tuple[bool, str]]] = {
    "ranks": _ranks,
    "collectives": _collectives,
    "data": _data,
    "training": _training,
    "checkpoint": _checkpoint,
}


def _parts(accelerator: Accelerator) -> tuple[Any, Any, Any]:

    class Net(nn.Sequential):
        """A model with layers for pipeline stages, and a plan for tensor parallelism."""

        tp_plan = {"0": "colwise", "2": "rowwise"}  # noqa: RUF012

    set_seed(0)
    wide = 4 * _WIDTH
    blocks = (nn.Linear(_WIDTH, wide), nn.Tanh(), nn.Linear(wide, _WIDTH), nn.Linear(_WIDTH, 1))
    model = Net(*blocks)
    inputs = torch.randn(_NUM_STEPS * 4 * accelerator.num_processes, _WIDTH)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=4 * accelerator.num_processes)
    return model, torch.optim.SGD(model.parameters(), lr=0.05), loader


def _steps(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any
) -> Iterator[torch.Tensor]:
    """Train for one epoch, to the end on all ranks; yield this rank's loss of each step."""

    for inputs, targets in loader:
        yield accelerator.forward_backward(model, inputs, targets, mse_loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    sys.exit(0 if check_training() else 1)
