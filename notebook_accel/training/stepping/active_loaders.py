"""Which prepared loader is being iterated now, and at which batch it is.

Gradient accumulation (is this the last batch?), ``gather_for_metrics`` (how many samples are
repeated?) and checkpoints use it. A *pass* is one iteration over a loader, as ``for batch in
loader`` makes it. A *round* is the set of batches, one on each rank, on which the ranks work at the
same time.

Loops nest (an evaluation within an epoch) and may be left early, so the passes form a stack. A pass
moves to the top whenever it gives a batch, and leaves the stack when its iterator ends, is closed,
or is garbage collected.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from notebook_accel.rank.this_rank import RankContext, current


class ShortRound(NamedTuple):
    """The sample counts of a round (a batch on each rank) that may have fewer than a full one."""

    num_samples: int
    """Samples of all ranks in it, without those repeated to fill it up; -1 where that is not
    known."""

    batch_size: int | None
    """Samples in this rank's batch, repeated ones included; 0 where the rank gets none of the
    round, None where that is not known."""

    num_own_samples: int
    """Samples in this rank's batch that are not repeated."""


@dataclass(eq=False, slots=True)
class Position:
    """The state of one iteration over a prepared loader (a pass), as checkpoints save it.

    A round is one batch on each rank, on which the ranks work at the same time.
    """

    epoch: int = 0
    """Number of the epoch."""

    num_given: int = 0
    """Batches of the epoch that the loop has got, those that it skipped included."""

    num_in_blocks: int = 0
    """``num_given`` as the newest ``accumulate`` block began, or as the pass did."""

    remainder: int = -1
    """If the last round is not full, how many samples all ranks have in it, repeated ones not
    counted; 0 if it is known to be full, -1 if nothing is known. Before the loop reaches that
    round, it is what the sampler expects."""

    is_uneven: bool = False
    """Whether ranks may have batches of different sizes at the same step."""

    generators: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The states of the loader's generators as the pass began."""

    begin: Mapping[str, Any] = field(default_factory=dict)
    """The states of the global random numbers as the pass began."""

    reader_states: dict[int, Any] = field(default_factory=dict)
    """Of a dataset that says itself how far it is (``stateful``), its states after the last few
    batches read, by their numbers."""

    shard_pass: Any = None
    """What the sampler that divides the samples finds in this pass, if there is one."""

    short_round: ShortRound | None = None
    """What the round that the loop has now has; None where it is known to be full."""

    loader: Any = None
    """The loader, while the pass is under way; None before and after."""

    end_of_dataloader: bool = False
    """Whether the batch that the loop has now is the last."""

    at_step: int = 0
    """``num_given`` as an optimizer made its last step in this pass, or as the pass began."""

    is_after_step: bool = False
    """Whether the pass has had an optimizer's step, or was resumed in the middle."""

    is_stopped: bool = False
    """Whether a stop or an interrupt of the run ended the pass, and the pass was over training
    data (:meth:`ActiveLoaders.stop`): a checkpoint saved after that keeps its place."""


@dataclass(eq=False)
class LoaderProgress:
    """Epoch and position of a prepared loader, shared with what skips its first batches."""

    iteration: int = 0
    """Number of the epoch."""

    restored: Mapping[str, Any] | None = None
    """What the next pass has to go on from."""

    position: Position = field(default_factory=Position)
    """Of the pass that began or gave a batch last."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The pass that is under way stays with its loop: a pickled loader begins the epoch anew.
        return LoaderProgress, (self.iteration, self.restored)


class ActiveLoaders:
    """The loaders that this rank is iterating now: a pass (one iteration over a loader) for each.

    The active pass is the one that gave the newest batch, in nested loops the innermost. An
    iterator that was left early and is still referenced is no longer active once another loop reads
    a batch.
    """

    def __init__(self) -> None:
        self.stack: list[Position] = []
        # The loaders that gave batches for an optimizer's step.
        self.trained: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def position(self) -> Position:
        """The active pass; outside of loops a new ``Position``, of a pass that has not begun."""
        return self.stack[-1] if self.stack else Position()

    def drop(self, position: Position) -> None:
        """Remove a pass from the stack, since it has ended."""
        if position in self.stack:
            self.stack.remove(position)

    def stop(self, position: Position) -> None:
        """Mark a pass, and the passes of the loops around it, as ended by a stop or an interrupt.

        A checkpoint keeps the position of a marked pass. Once optimizers have stepped, only passes
        over loaders that gave batches for these steps are marked. So an evaluation is not marked:
        if it were resumed in the middle, its metric would be computed from the remaining samples
        only.
        """
        for one in (*self.stack, position):
            is_trained = any(one.loader.is_part_of(loader) for loader in self.trained)
            one.is_stopped = is_trained or not self.trained

    def clear(self) -> None:
        """Forget every pass, and which loaders were trained on."""
        self.stack.clear()
        self.trained.clear()


def active_loaders(context: RankContext | None = None) -> ActiveLoaders:
    """Return the passes under way on the rank of ``context``; None takes the current rank."""
    shared = (context or current()).shared
    found: ActiveLoaders | None = shared.get(ActiveLoaders)
    if found is None:
        found = shared[ActiveLoaders] = ActiveLoaders()
    return found
