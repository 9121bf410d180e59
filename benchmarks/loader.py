"""What a prepared loader costs beyond torch's own, and gathering beyond the bare collective.

First one process, then two ranks that a group joins, all contenders in the same processes and in
turn. A loader's figure is CPU time a batch, of rank 0; with two ranks, each batch of a rank is set
against one of torch's loader of the whole data. Gathering is wall time of 4 KB and of 4 MB
from each rank, the result's memory included. Quoted are medians, and medians of what each turn's
contender took over torch. Peers: accelerate, and Lightning Fabric where it is one process.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from timing import arguments, in_turn, table
from torch import multiprocessing
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable

RAW = "torch"
SIZES = (2, 16)
GATHERED = {"4 KB": 1 << 10, "4 MB": 1 << 20}  # float32


def batches(size: int, count: int) -> DataLoader[Any]:
    """A loader of ``count`` batches that cost little to make."""
    samples = TensorDataset(torch.randn(size * count, 8), torch.randn(size * count))
    return DataLoader(samples, batch_size=size)


def loaders(size: int, count: int) -> dict[str, Any]:
    """One pass of each over its loader, which gives this rank ``count`` batches."""
    from accelerate import Accelerator as Peer

    from notebook_accel import Accelerator

    of_all = count * (dist.get_world_size() if dist.is_initialized() else 1)
    prepared = Accelerator(cpu=True).prepare(batches(size, of_all))
    found = {
        RAW: batches(size, count),
        "notebook_accel": prepared,
        "notebook_accel, launched": _Launched(prepared),
        "accelerate": Peer(cpu=True).prepare(batches(size, of_all)),
    }
    if not dist.is_initialized():
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=1)
        found["lightning fabric"] = fabric.setup_dataloaders(batches(size, of_all))
    return found


class _Launched:
    """A loader in a rank that our launcher started, where batches are counted."""

    def __init__(self, loader: Any) -> None:
        from notebook_accel.actions.scoreboard import Scoreboard
        from notebook_accel.rank.this_rank import LaunchedContext

        self.loader = loader
        self.context = LaunchedContext(
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            run="benchmark",
            send=lambda _: None,
            board=Scoreboard(1),
        )

    def __iter__(self) -> Any:
        from notebook_accel.rank import this_rank

        before = this_rank.current()
        this_rank.enter(self.context)
        try:
            yield from self.loader  # measured with what this line costs
        finally:
            this_rank.enter(before)


def read(loader: Any, count: int) -> float:
    """CPU time a batch of one pass."""
    number = 0
    start = time.process_time()
    for _ in loader:
        number += 1
    spent = time.process_time() - start
    assert number == count, f"{number} batches, not {count}"
    return spent / number


def gatherers() -> dict[str, Callable[[torch.Tensor], object]]:
    """Each way to gather."""
    from accelerate.utils import gather as peer

    from notebook_accel.training.collectives import gather

    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def bare(tensor: torch.Tensor) -> None:
        all_gather(torch.empty(2 * len(tensor)), tensor)

    return {RAW: bare, "notebook_accel": gather, "accelerate": peer}


def collect(gatherer: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Wall time of one gathering that both ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    gatherer(tensor)
    return time.perf_counter() - start


def rows(spent: dict[str, list[float]]) -> list[dict[str, str]]:
    """The lines of a table."""
    return [row(name, list(zip(values, spent[RAW], strict=True))) for name, values in spent.items()]


def row(name: str, pairs: list[tuple[float, float]]) -> dict[str, str]:
    """One contender's line."""
    return {
        "": name,
        "us": f"{statistics.median(own for own, _ in pairs) * 1e6:.2f}",
        "over torch, us": f"{statistics.median(own - base for own, base in pairs) * 1e6:+.2f}",
        "times torch": f"{statistics.median(own / base for own, base in pairs):.3f}",
    }


def compare_loaders(repeats: int, count: int) -> None:
    """Print the tables of the loaders (on rank 0)."""
    for size in SIZES:
        spent = in_turn(loaders(size, count), lambda loader: read(loader, count), repeats)
        show(f"A batch of {size}, {world()}:", spent)


def compare_gathering(repeats: int) -> None:
    """Print the tables of the collectives (on rank 0)."""
    for size, length in GATHERED.items():
        tensor = torch.randn(length)
        spent = in_turn(gatherers(), lambda gatherer, it=tensor: collect(gatherer, it), repeats)
        show(f"Gathering {size}, {world()}:", spent)


def world() -> str:
    """How many ranks there are, in words."""
    return f"{dist.get_world_size()} ranks" if dist.is_initialized() else "one process"


def show(title: str, spent: dict[str, list[float]]) -> None:
    """Print a table, once."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"\n{title}\n{table(rows(spent))}", flush=True)


def be_rank(rank: int, folder: str, repeats: int, count: int) -> None:
    """What each of two ranks does."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update(ACCELERATE_USE_CPU="true", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    compare_loaders(repeats, count)
    compare_gathering(6 * repeats)
    dist.destroy_process_group()


def be_alone(_rank: int, repeats: int, count: int) -> None:
    """What one process does; in a child, since the ranks need a parent that has done nothing."""
    torch.set_num_threads(1)
    compare_loaders(repeats, count)


def main() -> None:
    options = arguments(__doc__, repeats=40).parse_args()
    repeats, count = (3, 50) if options.quick else (options.repeats, 300)
    start = multiprocessing.start_processes
    start(be_alone, (repeats, count), nprocs=1, start_method="fork")
    with tempfile.TemporaryDirectory() as folder:
        start(be_rank, (folder, repeats, count), nprocs=2, start_method="fork")


if __name__ == "__main__":
    main()
