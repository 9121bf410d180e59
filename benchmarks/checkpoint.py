"""Saving and loading a model of 200 MB and its AdamW's state of 400 MB: time, and extra memory.

All contenders take turns in one process, with one model and optimizer: each writes both, trains a
step, and reads what it wrote back. "Blocks" is how long the training waits; what goes on in the
background after that shows in the step, which changes all that was saved. Extra memory is how far
the process, and what it forked, rose at most above where it stood, over save and step, and over
load; what several processes share counts once. Ratios are medians over the turns, to
``torch.save`` and ``torch.load`` of the same turn. Nobody waits for the disk itself: the system
writes later.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timing import arguments, in_turn, seconds, table
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

RAW = "torch.save, torch.load"
MEGABYTE = 1e6
PAGE = os.sysconf("SC_PAGE_SIZE")


class Contender:
    """Saves and loads a model and its optimizer; this one by ``torch.save``."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.prepare()

    def prepare(self) -> None:
        """Hand both to the library, where there is one."""

    def save(self, folder: Path) -> None:
        torch.save(self.model.state_dict(), folder / "model.pt")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    def step(self) -> None:
        """Train: it changes every weight and all that the optimizer keeps."""
        train(self.model, self.optimizer)

    def finish(self) -> None:
        """Wait for what goes on in the background."""

    def load(self, folder: Path) -> None:
        self.model.load_state_dict(torch.load(folder / "model.pt"))
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))


class Distributed(Contender):
    """torch.distributed.checkpoint, which reads in place."""

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        from torch.distributed import checkpoint

        checkpoint.save(self.state(), checkpoint_id=folder, no_dist=True)

    def load(self, folder: Path) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class Ours(Contender):
    """This package."""

    def prepare(self) -> None:
        from notebook_accel import Accelerator

        self.accelerator: Any = Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))


class OursInBackground(Ours):
    """This package, while the training goes on."""

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder), async_save=True)

    def finish(self) -> None:
        self.accelerator.wait_for_checkpoint()


class Accelerate(Ours):
    """Hugging Face Accelerate."""

    def prepare(self) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)


class Fabric(Contender):
    """Lightning Fabric."""

    def prepare(self) -> None:
        from lightning_fabric import Fabric

        self.fabric: Any = Fabric(accelerator="cpu", devices=1)
        self.model, self.optimizer = self.fabric.setup(self.model, self.optimizer)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def save(self, folder: Path) -> None:
        self.fabric.save(folder / "state.ckpt", self.state)

    def step(self) -> None:
        train(self.model.module, self.optimizer)  # the wrapper has no layers of its own

    def load(self, folder: Path) -> None:
        self.fabric.load(folder / "state.ckpt", self.state)


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A step of training."""
    model(torch.ones(1, model[0].in_features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(width: int, depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has a state."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return model, optimizer


CONTENDERS: dict[str, type[Contender]] = {
    RAW: Contender,
    "torch.distributed.checkpoint": Distributed,
    "notebook_accel": Ours,
    "notebook_accel, async_save": OursInBackground,
    "accelerate": Accelerate,
    "Lightning Fabric": Fabric,
}


@contextmanager
def rise_of_memory() -> Iterator[list[float]]:
    """How many MB this process and its children rise at most in the block: one number."""
    found: list[float] = []
    done = threading.Event()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed and kept would hide what is taken
    base, peak = memory(), 0.0

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, memory() - base)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()
        found.append(max(peak, memory() - base) / MEGABYTE)


def memory() -> float:
    """Bytes that this process and its children have; shared ones once, those of files never."""
    children = Path("/proc/thread-self/children").read_text().split()
    children += Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    if not children:
        pages = Path("/proc/self/statm").read_text().split()
        return float((int(pages[1]) - int(pages[2])) * PAGE)
    return sum(private_memory(process) for process in ("self", *children))


def private_memory(process: str) -> float:
    """Bytes of one process, those that it shares with others in part."""
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return float(line.split()[1]) * 1024
    return 0.0


def measure(contender: Contender, folder: Path, *, with_memory: bool) -> dict[str, float]:
    """One save and one load."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if with_memory:
        with rise_of_memory() as saving:
            contender.save(folder)
            contender.step()
            contender.finish()
        with rise_of_memory() as loading:
            contender.load(folder)
        return {"save, MB": saving[0], "load, MB": loading[0]}
    ctypes.CDLL(None).malloc_trim(0)  # a fork copies what others left, too
    start = time.perf_counter()
    contender.save(folder)
    saved = time.perf_counter()
    contender.step()
    stepped = time.perf_counter()
    contender.finish()
    finished = time.perf_counter()
    contender.load(folder)
    return {
        "blocks": saved - start,
        "next step": stepped - saved,
        "load": time.perf_counter() - finished,
    }


def rows(
    spent: dict[str, list[dict[str, float]]], used: dict[str, list[dict[str, float]]]
) -> list[dict[str, str]]:
    """The lines of the table."""

    def middle(found: list[dict[str, float]], key: str) -> float:
        return statistics.median(turn[key] for turn in found)

    def over_raw(name: str, key: str) -> str:
        pairs = zip(spent[name], spent[RAW], strict=True)
        return f"{statistics.median(own[key] / base[key] for own, base in pairs):.3f}"

    return [
        {
            "": name,
            "save blocks": seconds(middle(spent[name], "blocks")),
            "times torch": over_raw(name, "blocks"),
            "next step": over_raw(name, "next step"),
            "load": seconds(middle(spent[name], "load")),
            "times torch ": over_raw(name, "load"),
            "extra memory, save": f"{middle(used[name], 'save, MB'):.0f} MB",
            "load ": f"{middle(used[name], 'load, MB'):.0f} MB",
        }
        for name in spent
    ]


def main() -> None:
    parser = arguments(__doc__, repeats=15)
    parser.add_argument("--folder", type=Path, help="on the disk to write to")
    options = parser.parse_args()
    width, depth, repeats = (500, 5, 3) if options.quick else (2000, 12, options.repeats)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    model, optimizer = trained(width, depth)
    kinds = dict(CONTENDERS)
    if importlib.util.find_spec("lightning_fabric") is None:
        print("Lightning Fabric is left out: lightning-fabric is not installed")
        del kinds["Lightning Fabric"]
    contenders = {name: kind(model, optimizer) for name, kind in kinds.items()}
    size = sum(weight.nbytes for weight in model.parameters()) / MEGABYTE
    with tempfile.TemporaryDirectory(dir=options.folder) as work:

        def run(repeats: int, *, with_memory: bool) -> Any:
            def one(contender: Contender) -> dict[str, float]:
                return measure(contender, Path(work, "checkpoint"), with_memory=with_memory)

            return in_turn(contenders, one, repeats)

        spent = run(repeats, with_memory=False)
        used = run(3, with_memory=True)
    print(f"A model of {size:.0f} MB, and twice that of AdamW:")
    print(table(rows(spent, used)))


if __name__ == "__main__":
    main()
