"""Published training loops run with only the import changed, and give Accelerate's numbers.

The loops are in ``scripts/``. One launch runs them all on two CPU ranks, with one library and then
with the other, one loop after the other; the numbers of rank r must be those of Accelerate's. Where
ours differs on purpose, the loop is one of the second half, and is compared with what is right: the
single process, or every sample once.
"""

from __future__ import annotations

import gc
import importlib
import math
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel import notebook_launcher
from tests.training.scripts import LOOPS
from tests.training.scripts.images import train_on_buckets

pytest.importorskip("accelerate")
# A launch that imports transformers and runs thirty loops twice: some 12 s where nothing else runs.
pytestmark = pytest.mark.timeout(600)


def forget(library: Any) -> None:
    """Let the next loop begin as a script of its own would."""
    library.state.GradientState._reset_state()
    library.state.AcceleratorState._reset_state()
    gc.collect()
    # What is left stays, most of it modules: to look through it after each loop would take 0.1 s.
    gc.freeze()


def run_loops_of_both(names: list[str], folder: str) -> dict[str, dict[str, Any]]:
    """Of each library, what each loop gives on this rank, or the text of its error."""
    # Ours first: as in a script, it finds no process group but its own.
    libraries = ("notebook_accel", "accelerate")
    return {library: run_loops(library, names, f"{folder}/{library}") for library in libraries}


def run_loops(library_name: str, names: list[str], folder: str) -> dict[str, Any]:
    library = importlib.import_module(library_name)
    # Accelerate's PartialState() alone makes a world of one on a CPU, whatever was launched.
    state = library.Accelerator(cpu=True).state
    results = {}
    for name in names:
        own = Path(folder) / name
        own.mkdir(parents=True, exist_ok=True)
        forget(library)
        torch.manual_seed(0)
        state.wait_for_everyone()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results[name] = LOOPS[name](library, own)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        state.wait_for_everyone()
    return results


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Of each library, what its two ranks gave."""
    folder = str(tmp_path_factory.mktemp("loops"))
    run = notebook_launcher(
        run_loops_of_both, (list(LOOPS), folder), num_processes=2, view="none", timeout=500
    )
    return {library: [rank[library] for rank in run] for library in run[0]}


@pytest.mark.parametrize("name", LOOPS)
def test_a_script_gives_accelerates_numbers(
    name: str, numbers: dict[str, list[dict[str, Any]]]
) -> None:
    for theirs, ours in zip(numbers["accelerate"], numbers["notebook_accel"], strict=True):
        assert "error" not in theirs[name], theirs[name]["error"]
        assert "error" not in ours[name], ours[name]["error"]
        assert list(differences(theirs[name], ours[name])) == []


def differences(theirs: Any, ours: Any, path: str = "") -> Any:
    """Where two results differ: numbers by more than the order of sums explains."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        for key in theirs:
            yield from differences(theirs[key], ours[key], f"{path}.{key}")
    elif isinstance(theirs, (list, tuple)) and len(theirs) == len(ours):
        for index, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(theirs, float):
        if not math.isclose(theirs, ours, rel_tol=1e-5, abs_tol=1e-7):
            yield path, theirs, ours
    elif theirs != ours:
        yield path, theirs, ours


# Where ours differs from Accelerate on purpose (docs/from-accelerate.md): compared with what
# is right.


def differ_on_purpose(folder: str) -> dict[str, Any]:
    """Loops on which Accelerate hangs, breaks, or computes something else."""
    import notebook_accel as accelerate

    results: dict[str, Any] = {}
    # Buckets with a rest: Accelerate mixes two widths in the last round, and stacking them fails.
    results["buckets"] = train_on_buckets(accelerate, [2, 3, 4, 4, 3, 2, 3])
    forget(accelerate)
    results["zero_grad"] = [used(accelerate, first) for first in (True, False)]
    forget(accelerate)
    results["dropped"] = drops_a_window(accelerate)
    forget(accelerate)
    results["metrics"] = gathers_what_is_odd(accelerate)
    forget(accelerate)
    results["plateau"] = reduces_on_a_plateau(accelerate)
    forget(accelerate)
    results["resume"] = resumes_without_skipping(accelerate, Path(folder))
    return results


def used(accelerate: Any, zero_first: bool) -> list[float]:
    """The gradient of each step, with ``zero_grad`` first or last in an accumulated loop."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    weight = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    data = torch.arange(1.0, 9.0)[:, None]
    model, optimizer, loader = accelerator.prepare(
        weight, optimizer, torch.utils.data.DataLoader(data, batch_size=1)
    )
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            if zero_first:
                optimizer.zero_grad()
            accelerator.backward(model(batch).sum())
            if accelerator.sync_gradients:
                seen.append(float(weight.weight.grad))
            optimizer.step()
            if not zero_first:
                optimizer.zero_grad()
    return seen


def drops_a_window(accelerate: Any) -> int:
    """Steps that were made after a window whose norm is not finite."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.tensor([1.0, 1, float("nan"), 1, 1, 1, 1, 1, 1, 1, 1, 1])[:, None]
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=1)
    )
    steps = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                if not torch.isfinite(norm):
                    optimizer.zero_grad()
                    continue
                steps += 1
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    return steps


def gathers_what_is_odd(accelerate: Any) -> dict[str, Any]:
    """Scalars on the last batch, uneven batches, and nothing on one rank."""
    config = accelerate.DataLoaderConfiguration(even_batches=False)
    accelerator = accelerate.Accelerator(dataloader_config=config)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(10), batch_size=3))  # type: ignore[arg-type]
    rows, losses, found = [], [], []
    for batch in loader:
        rows += accelerator.gather_for_metrics(batch).tolist()
        losses.append(len(accelerator.gather_for_metrics(batch.float().mean())))
        found += accelerator.gather_for_metrics([int(i) for i in batch if i < 3])
    return {"rows": rows, "losses": losses, "found": found}


def reduces_on_a_plateau(accelerate: Any) -> list[float]:
    """The rate after each epoch without progress, with a patience of 1."""
    accelerator = accelerate.Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for _ in range(4):
        schedule.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def resumes_without_skipping(accelerate: Any, folder: Path) -> bool:
    """A plain shuffled loader, resumed in mid-epoch by a script that does not skip."""

    def begin(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        accelerator = accelerate.Accelerator()
        data = torch.utils.data.DataLoader(range(16), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        return accelerator, accelerator.prepare(data)

    accelerator, loader = begin(1)
    whole = []
    for _ in range(2):
        for index, batch in enumerate(loader):
            whole.append(batch.tolist())
            if index == 1 and len(whole) == 2:
                accelerator.save_state(folder / "state")
    accelerator, loader = begin(2)
    accelerator.load_state(folder / "state")
    return [batch.tolist() for _ in range(2) for batch in loader] == whole[2:]


def test_loops_where_ours_differs_on_purpose(tmp_path: Path) -> None:
    run = notebook_launcher(
        differ_on_purpose, (str(tmp_path),), num_processes=2, view="none", timeout=250
    )
    first, second = run
    # Widths 2, 2 | 3, 3 and 3, nothing: the first batch again, whole.
    assert first["buckets"]["shapes"] == [[2, 2], [1, 3]]
    assert second["buckets"]["shapes"] == [[2, 3], [2, 4]]
    for got in (first, second):
        # Single process: the mean over both ranks of the inputs, summed over the window, halved.
        assert got["zero_grad"] == [[2.5, 6.5], [2.5, 6.5]]
        assert got["dropped"] == 2, "the window of the NaN alone is lost"
        assert sorted(got["metrics"]["rows"]) == list(range(10))
        assert got["metrics"]["losses"] == [2, 2]
        assert got["metrics"]["found"] == [0, 1, 2]
        assert got["plateau"] == [1.0, 1.0, 0.5, 0.5]
        assert got["resume"]
