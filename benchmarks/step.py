"""What a training step costs beyond the raw loop: CPU time on one thread, one process.

A tiny MLP, so that the wrappers show. All contenders live in one process and take turns, block by
block; quoted are medians over the blocks, and ratios to the raw block of the same turn. A second
raw loop among them shows how far two that are alike come apart on this machine. The second table
does the same for a loader's batches alone. Peers: accelerate and Lightning Fabric.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from timing import arguments, in_turn, table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RAW, AGAIN = "raw loop", "raw loop, once more"


def tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the same for all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def batches() -> DataLoader[Any]:
    """Batches that cost little to make."""
    samples = TensorDataset(torch.randn(4096, 16), torch.randn(4096, 4))
    return DataLoader(samples, batch_size=2)


INPUTS, TARGETS = torch.randn(8, 16), torch.randn(8, 4)


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Any], object]
) -> Callable[[int], None]:
    """A block of training steps."""
    loss_of = nn.functional.mse_loss

    def block(count: int) -> None:
        for _ in range(count):
            backward(loss_of(model(INPUTS), TARGETS))
            optimizer.step()
            optimizer.zero_grad()

    return block


def accumulating(
    model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Any
) -> Callable[[int], None]:
    """The same inside ``accumulate``, as many loops are written."""
    loss_of = nn.functional.mse_loss

    def block(count: int) -> None:
        for _ in range(count):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(INPUTS), TARGETS))
                optimizer.step()
                optimizer.zero_grad()

    return block


def raw() -> Callable[[int], None]:
    """Torch alone."""
    return loop(*tiny(), torch.Tensor.backward)


def ours(*, accumulates: bool = False) -> Callable[[int], None]:
    """This package."""
    from notebook_accel import Accelerator

    return with_accelerator(Accelerator(cpu=True), accumulates=accumulates)


def accelerate(*, accumulates: bool = False) -> Callable[[int], None]:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    return with_accelerator(Accelerator(cpu=True), accumulates=accumulates)


def with_accelerator(accelerator: Any, *, accumulates: bool) -> Callable[[int], None]:
    """A block of either Accelerator."""
    model, optimizer = accelerator.prepare(*tiny())
    if accumulates:
        return accumulating(model, optimizer, accelerator)
    return loop(model, optimizer, accelerator.backward)


def fabric() -> Callable[[int], None]:
    """Lightning Fabric."""
    from lightning_fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=1)
    model, optimizer = runner.setup(*tiny())
    return loop(model, optimizer, runner.backward)


def reading(loader: Iterable[Any]) -> Callable[[int], None]:
    """A block that goes through a loader; ``count`` batches make a pass."""

    def block(count: int) -> None:
        for number, _ in enumerate(loader, start=1):
            if number == count:
                break

    return block


def loaders() -> dict[str, Callable[[int], None]]:
    """A block for each loader."""
    from accelerate import Accelerator as Peer
    from lightning_fabric import Fabric

    from notebook_accel import Accelerator

    return {
        RAW: reading(batches()),
        AGAIN: reading(batches()),
        "notebook_accel": reading(Accelerator(cpu=True).prepare(batches())),
        "accelerate": reading(Peer(cpu=True).prepare(batches())),
        "lightning fabric": reading(
            Fabric(accelerator="cpu", devices=1).setup_dataloaders(batches())
        ),
    }


def steps() -> dict[str, Callable[[int], None]]:
    """A block for each loop."""
    return {
        RAW: raw(),
        AGAIN: raw(),
        "notebook_accel": ours(),
        "notebook_accel, in accumulate": ours(accumulates=True),
        "accelerate": accelerate(),
        "accelerate, in accumulate": accelerate(accumulates=True),
        "lightning fabric": fabric(),
    }


def measured() -> dict[str, Callable[[int], None]]:
    """A loop in a launched rank, whose steps are measured, and in any other process."""
    from notebook_accel import Accelerator
    from notebook_accel.actions.scoreboard import Scoreboard
    from notebook_accel.rank import this_rank
    from notebook_accel.training.stepping.step_timer import NoTimer, StepTimer

    numbers = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1}
    context = this_rank.LaunchedContext(
        run="", send=lambda _: None, board=Scoreboard(1), store_port=None, **numbers
    )
    this_rank.enter(context)
    block = reading_and_stepping(Accelerator(cpu=True))
    timer, no_timer = context.shared[StepTimer], NoTimer(context, torch.device("cpu"))

    def without(count: int) -> None:
        context.shared[StepTimer] = no_timer
        block(count)
        context.shared[StepTimer] = timer

    return {RAW: without, AGAIN: without, "measured": block}


def reading_and_stepping(accelerator: Any) -> Callable[[int], None]:
    """A block of steps on a prepared loader's batches."""
    model, optimizer, loader = accelerator.prepare(*tiny(), batches())

    def block(count: int) -> None:
        for number, (inputs, targets) in enumerate(loader, start=1):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if number == count:
                break

    return block


def measure(
    blocks: dict[str, Callable[[int], None]], *, repeats: int, count: int
) -> list[dict[str, str]]:
    """CPU time of one step, over the raw one."""

    def spend(block: Callable[[int], None]) -> float:
        start = time.process_time()
        block(count)
        return (time.process_time() - start) / count

    spent = in_turn(blocks, spend, repeats)
    return [row(name, spent) for name in blocks]


def row(name: str, spent: dict[str, list[float]]) -> dict[str, str]:
    """One contender's line of the table."""
    pairs = list(zip(spent[name], spent[RAW], strict=True))
    return {
        "": name,
        "us": f"{statistics.median(spent[name]) * 1e6:.1f}",
        "over raw, us": f"{statistics.median(own - base for own, base in pairs) * 1e6:+.1f}",
        "times raw": f"{statistics.median(own / base for own, base in pairs):.3f}",
    }


def main() -> None:
    options = arguments(__doc__, repeats=40).parse_args()
    repeats, count = (3, 50) if options.quick else (options.repeats, 300)
    torch.set_num_threads(1)
    print("A training step:")
    print(table(measure(steps(), repeats=repeats, count=count)))
    print("\nThe same, without its parts measured (raw) and with:")
    print(table(measure(measured(), repeats=repeats, count=count)))
    print("\nA batch of a loader:")
    print(table(measure(loaders(), repeats=repeats, count=count)))


if __name__ == "__main__":
    main()
