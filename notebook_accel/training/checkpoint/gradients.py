"""Gradients that no step has used yet: of a window that is open as a checkpoint is saved.

Each rank has gradients of its own batches, in a file of its own, ``gradients_{rank}.bin``. If as
many ranks load them, each takes its own. A rank that has no file, or all ranks if their number
differs, take the mean of all that were saved, which is what the exchange at the end of the window
would have given. Gradients in parts, or of layers that several ranks compute together, have no such
mean, and mean nothing to ranks that stand otherwise: a line says so, and the window is a smaller
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training.checkpoint.state_files import read_state
from notebook_accel.training.notices import notice

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch.nn import Module

    from notebook_accel.training.optimizer import AcceleratedOptimizer
    from notebook_accel.training.strategies import Strategy
    from notebook_accel.training.topology import Topology

__all__ = ["collect_gradients", "gradients_file", "restore_gradients"]

_Gradients = dict[str, Any]

# The dimensions of a mesh along which ranks have other layers, or other parts of them.
_DIVIDES = {"pp", "tp"}


def gradients_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"gradients_{rank}.bin"


def collect_gradients(
    strategy: Strategy, models: Sequence[Module], optimizers: Sequence[AcceleratedOptimizer]
) -> dict[str, Any] | None:
    """This rank's gradients that the next step is to use; None where there are none."""
    waiting = {
        id(weight)
        for optimizer in optimizers
        if not optimizer.has_used_gradients
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    found = [
        strategy.pending_gradients(model, waiting) if waiting else ({}, {}) for model in models
    ]
    whole, parts = [one for one, _ in found], [one for _, one in found]
    if not any((*whole, *parts)):
        return None
    return {
        "whole": whole,
        "parts": parts,
        "num_ranks": strategy.topology.num_processes,
        "layout": strategy.layout,
    }


def restore_gradients(
    strategy: Strategy, models: Sequence[Module], folder: Path, options: dict[str, Any]
) -> bool:
    """Give the models the gradients of a checkpoint; whether it has some."""
    here = strategy.topology
    files = sorted(folder.glob("gradients_*.bin"))
    if not files:
        return False
    own = folder / gradients_file(here.process_index)
    state = read_state(own if own in files else files[0], options)
    num_ranks, layout = state["num_ranks"], state.get("layout", [])
    has_own = own in files and num_ranks == here.num_processes
    if not (has_own and layout == strategy.layout):
        is_divided = any(name in _DIVIDES for name, _ in (*layout, *strategy.layout))
        if is_divided or any(state["parts"]) or not any(state["whole"]):
            notice(
                f"{folder} was saved by {num_ranks} ranks in the middle of an accumulation "
                "window, with gradients that were spread over them in another way than over the "
                f"{here.num_processes} here: the rest of this window is a smaller one. Save after "
                "a step to go on exactly"
            )
            return False
        if not has_own:
            state["whole"] = _mean(files, options)
    missing = [
        rank for rank in _ranks_seen(here, num_ranks) if folder / gradients_file(rank) not in files
    ]
    if missing:
        notice(
            f"{folder} was saved in the middle of an accumulation window without the gradients of "
            f"rank {', '.join(map(str, missing))}: the mean of the others' stands for them"
        )
    for model, whole, parts in zip(models, state["whole"], state["parts"], strict=True):
        strategy.restore_gradients(model, whole, parts)
    return True


def _ranks_seen(here: Topology, num_ranks: int) -> range:
    """The ranks whose files must be here: this machine's own, since it may have its own disk."""
    if num_ranks != here.num_processes:
        return range(num_ranks)
    first = here.process_index - here.local_process_index
    return range(first, first + here.local_num_processes)


def _mean(files: Sequence[Path], options: dict[str, Any]) -> list[_Gradients]:
    mean: list[_Gradients] = []
    for path in files:
        each: list[_Gradients] = read_state(path, options)["whole"]
        mean = mean or [{} for _ in each]
        for sums, gradients in zip(mean, each, strict=True):
            for name, gradient in gradients.items():
                share = gradient / len(files)
                sums[name] = sums[name] + share if name in sums else share
    return mean
