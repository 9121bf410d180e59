"""What a prepared loader shows of its newest pass, and how code marks a pass that it makes itself.

The newest pass is the one that began or gave a batch last: within a loop over the loader that is
the loop's, unless another pass over the same loader has begun since its last batch.

A loop over a prepared loader needs none of the setters and marks. They are for classes that users
and libraries derive from Accelerate's loaders, with an ``__iter__`` of their own::

    self.begin() -> batches -> self.end_of_dataloader = True -> the last batch -> self.end()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError
from notebook_accel.training.data.active import LoaderProgress, Position, active_loaders
from notebook_accel.training.data.samplers import (
    BatchSamplerShard,
    SkipBatchSampler,
    batch_sampler_of,
    get_sampler,
)

if TYPE_CHECKING:
    from notebook_accel.training.accumulation import Accumulation
    from notebook_accel.training.data.options import LoaderOptions
    from notebook_accel.training.state import GradientState

__all__ = ["PassView"]


class PassView:
    """Base of the prepared loaders: their newest pass and their sampler."""

    _options: LoaderOptions
    _progress: LoaderProgress
    # Gradient accumulation of the Accelerator that prepared it; None: of the newest Accelerator.
    _accumulation: Accumulation | None = None

    if TYPE_CHECKING:

        @property
        def _shard(self) -> Any: ...

        def _generator_states(self) -> dict[str, Any]: ...

    def _join(self, accumulation: Accumulation) -> None:
        """Belong to the training of this gradient accumulation."""
        self._accumulation = accumulation

    @property
    def gradient_state(self) -> GradientState:
        """Where the training stands in its gradient accumulation and its loader."""
        # Imported here: the state asks which loader is read.
        from notebook_accel.training.state import GradientState

        return GradientState(accumulation=self._accumulation)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch that the newest pass gave is its last."""
        position = self._progress.position
        return position is not None and position.end_of_dataloader

    @end_of_dataloader.setter
    def end_of_dataloader(self, value: bool) -> None:
        position = self._marked_position()
        position.end_of_dataloader = value
        if value:
            self._note_last_round(position)

    @property
    def remainder(self) -> int:
        """Samples of all ranks in the last round, as :class:`Position` has it."""
        position = self._progress.position
        return -1 if position is None else position.remainder

    @remainder.setter
    def remainder(self, value: int) -> None:
        self._marked_position().remainder = value

    def _marked_position(self) -> Position:
        """The newest pass, for code that makes passes itself and marks how far they are; a new one
        if there is none."""
        if self._progress.position is None:
            self.reset()
        assert self._progress.position is not None
        return self._progress.position

    def _note_last_round(self, position: Position) -> None:
        """Note what the last round lacks, as the sampler has found once it has no more."""
        found = position.shard_pass or getattr(self._shard, "newest_pass", None)
        if found is not None:
            position.short_round = found.last_round
        if position.short_round is not None:
            position.remainder = position.short_round.num_samples

    def _new_position(self, **known: Any) -> Position:
        """Where a pass that begins now stands; ``known`` is for :class:`Position`."""
        return Position(
            epoch=self._progress.iteration,
            samples=self._progress.samples,
            remainder=getattr(self._shard, "remainder", -1),
            is_uneven=getattr(self._shard, "is_uneven", self._options.is_uneven),
            generators=self._generator_states(),
            **known,
        )

    def reset(self) -> None:
        """Forget how far the newest pass was."""
        position = self._progress.position = Position(epoch=self._progress.iteration)
        # No pass is under way: a checkpoint begins with the next one.
        position.is_over = True

    def begin(self) -> None:
        """Make this loader the active one, at the start of a pass."""
        position = self._new_position()
        position.loader = self
        self._progress.position = position
        active_loaders().put_on_top(position)

    def end(self) -> None:
        """End the passes over this loader that are under way."""
        active = active_loaders()
        for position in [each for each in active.stack if each.loader is self]:
            active.drop(position)
            position.is_over = True
            position.loader = None

    def get_sampler(self: Any) -> Any:
        """The sampler that gives the loader its indices one by one; None where it has none."""
        return get_sampler(self)

    def set_sampler(self: Any, sampler: Any) -> None:
        """Let the loader take its indices from another sampler, from its next pass on.

        Args:
            sampler: in the same order on every rank: each takes its part of it.

        Raises:
            ConfigError: nothing in the loader groups the indices of a sampler into batches.
        """
        batches = given = batch_sampler_of(self)
        while isinstance(given, (BatchSamplerShard, SkipBatchSampler)):
            given = given.batch_sampler
        if not hasattr(given, "sampler"):
            raise ConfigError(
                "set_sampler() needs a loader whose batches are made of a sampler's indices, and "
                f"this one has {type(given).__name__}: make a DataLoader with "
                "sampler=... and batch_size=..., and prepare it"
            )
        while hasattr(batches, "sampler"):
            batches.sampler = sampler
            batches = getattr(batches, "batch_sampler", None)
