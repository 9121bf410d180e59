"""Gradients that no step has used yet: of a window that is open as a checkpoint is saved.

Each rank has gradients of its own batches, in a file of its own, ``gradients_{rank}.bin``. Where
as many ranks load them, each takes its own. Other ranks take the mean of all, as the exchange at
the end of the window would have made it, where the gradients were whole.
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

__all__ = ["collect_gradients", "gradients_file", "restore_gradients"]

_Gradients = dict[str, Any]


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
    return {"whole": whole, "parts": parts, "num_ranks": strategy.topology.num_processes}


def restore_gradients(strategy: Strategy, models: Sequence[Module], folder: Path) -> bool:
    """Give the models the gradients of a checkpoint; whether it has some."""
    here = strategy.topology
    first = folder / gradients_file(0)
    own = folder / gradients_file(here.process_index)
    if not (own if own.exists() else first).exists():
        return False
    state = read_state(own if own.exists() else first)
    if state["num_ranks"] != here.num_processes:
        if any(state["parts"]) or not any(state["whole"]):
            notice(
                f"{folder} was saved by {state['num_ranks']} ranks in the middle of an "
                "accumulation window, with gradients in parts: the rest of this window is a "
                "smaller one"
            )
            return False
        state["whole"] = _mean(folder, state["num_ranks"])
    for model, whole, parts in zip(models, state["whole"], state["parts"], strict=True):
        strategy.restore_gradients(model, whole, parts)
    return True


def _mean(folder: Path, num_ranks: int) -> list[_Gradients]:
    mean: list[_Gradients] = []
    for rank in range(num_ranks):
        each: list[_Gradients] = read_state(folder / gradients_file(rank))["whole"]
        mean = mean or [{} for _ in each]
        for sums, gradients in zip(mean, each, strict=True):
            for name, gradient in gradients.items():
                share = gradient / num_ranks
                sums[name] = sums[name] + share if name in sums else share
    return mean
