"""Where a prepared loader stands, and how it goes on from there in the middle of an epoch.

::

    loop has batch n    state_dict() -> the epoch, n + 1 batches given, and the random states
                                        from which the order of the epoch was drawn
    load_state_dict()   sets the epoch; keeps the rest for the pass that comes next
    next pass           _restore() -> the random states are set, and batch n + 1 is its first

A checkpoint that is saved while an accumulation window is open takes ``state_at_step()`` instead:
the place as the window began, since the gradients of its batches are not kept.

A place is counted in batches of this rank, of the whole epoch, those included that were left out
by ``skip_first_batches``. Which samples they are follows from the order, which the random states
give again. What reading draws from the global random numbers is in ``replay``; a dataset that says
itself how far it is, in ``stateful``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from notebook_accel.training.collectives import broadcast_object_list
from notebook_accel.training.data.joined import WholeLoader
from notebook_accel.training.data.pass_view import PassView
from notebook_accel.training.data.samplers import (
    BatchSamplerShard,
    SkipBatchSampler,
    samplers_of,
)
from notebook_accel.training.data.seedable import SeedableRandomSampler
from notebook_accel.training.data.streams import IterableDatasetShard
from notebook_accel.training.random_states import as_plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from notebook_accel.training.data.active import LoaderProgress
    from notebook_accel.training.data.options import LoaderOptions
    from notebook_accel.training.data.replay import IndexSource

__all__ = ["ResumableLoader"]


class ResumableLoader(DataLoader[Any], PassView, WholeLoader):
    """Base of the prepared loaders: the sizes of steps, the epoch, and the state of both."""

    _options: LoaderOptions
    _progress: LoaderProgress
    _index: IndexSource

    @property
    def synchronized_generator(self) -> torch.Generator | None:
        """The generator that the order comes from, where there is one."""
        return self._options.synchronized_generator

    @property
    def skip_batches(self) -> int:
        """Batches at the start of each epoch that are left out."""
        return self._options.skip_batches or 0

    @property
    def iteration(self) -> int:
        """Number of the epoch that comes next, or is under way and not yet at its last batch."""
        return self._progress.iteration

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def total_batch_size(self) -> int | None:
        """Samples of all ranks a step; None where it is not known."""
        size = self.given_batch_size
        if size is None or self._options.split_batches:
            return size
        return size * self._options.num_processes

    @property
    def own_batch_size(self) -> int | None:
        """Samples of this rank a step; None where it is not known."""
        size = self.total_batch_size
        return None if size is None else size // self._options.num_processes

    @property
    def given_batch_size(self) -> int | None:
        """The batch size that the loader was made with; None where it has none."""
        parts = (self._shard, self._index.sampler, self)
        return next(filter(None, (getattr(part, "batch_size", None) for part in parts)), None)

    @property
    def _batches_a_round(self) -> int:
        return 1 if self._options.split_batches else self._options.num_processes

    @property
    def _shard(self) -> Any:
        """The sampler or dataset that knows which part of the samples is this rank's."""
        is_ours = isinstance(self.dataset, IterableDatasetShard)  # a user's own knows nothing of it
        return self.dataset if is_ours else self._index.sampler

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes, to the samplers and the dataset too."""
        self._progress.iteration = epoch
        ours = (BatchSamplerShard, SkipBatchSampler)  # they only pass it on to what is inside
        users = [sampler for sampler in samplers_of(self) if not isinstance(sampler, ours)]
        for part in (*users, self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    @property
    def is_iterated(self) -> bool:
        """Whether a loop over this loader is under way."""
        position = self._progress.position
        return position is not None and position.loader is not None and not position.is_over

    def state_dict(self) -> dict[str, Any]:
        """Give the epoch, the random states at its start, and the number of batches given in it.

        While the loop has the last batch, that is the start of the next epoch; after a ``break``
        the start of the same one; after a stop of the run the place where it stopped.
        """
        progress, position = self._progress, self._progress.position
        epoch, given, lacking, drawn = progress.iteration, 0, 0, None
        if progress.restored is not None:
            given, states = int(progress.restored["given"]), progress.restored["generators"]
            drawn, lacking = progress.restored.get("random"), progress.restored.get("lacking", 0)
        elif (
            position is None
            or position.end_of_dataloader
            or (position.is_over and not position.is_stopped)
        ):
            states = self._generator_states()
        else:
            epoch, given, states = position.epoch, position.num_given, position.generators
            drawn, lacking = position.replay.state_dict(), position.num_lacking
        return {
            "iteration": epoch,
            "given": given,
            "lacking": lacking,
            "generators": states,
            "random": drawn,
            "samples": progress.samples,
            "seeds": [sampler.initial_seed for sampler in self._seedable_samplers()],
            "total_batch_size": self.total_batch_size,
            "batches_a_round": self._batches_a_round,
            "num_readers": self._num_readers,
        }

    def state_at_step(self) -> dict[str, Any]:
        """Give the state as an optimizer made its last step in the pass that is under way, or as
        the pass began; where none is, the present state."""
        state, position = self.state_dict(), self._progress.position
        if (
            self._progress.restored is not None
            or position is None
            or (position.is_over and not position.is_stopped)
        ):
            return state
        given, lacking, ahead = position.at_step
        drawn = position.replay.state_dict()
        return {
            **state,
            "iteration": position.epoch,
            "given": given,
            "lacking": lacking,
            "generators": position.generators,
            "random": None if ahead is None else {**drawn, "ahead": [*map(as_plain, ahead)]},
            "reader": None,
            "samples": position.samples,
        }

    def _step_sizes(self, state_dict: Mapping[str, Any]) -> tuple[int, int]:
        """How much a step took then and takes now: samples, or batches where these are unknown."""
        before, now = state_dict.get("total_batch_size"), self.total_batch_size
        if before and now:
            return int(before), now
        now = self._batches_a_round
        return int(state_dict.get("batches_a_round", now)), now

    def _reads_as_then(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether this rank reads the same samples at each step as when the state was saved.

        If not, the random states of its reads are of no use, nor is the place of its dataset.
        """
        before, now = self._step_sizes(state_dict)
        num_readers = self._num_readers
        return before == now and state_dict.get("num_readers", num_readers) == num_readers

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken: the next pass is the rest of that epoch.

        Where a step had another number of samples then (of more ranks, say), the rest begins with
        the batch that holds the first sample not yet seen.
        """
        before, now = self._step_sizes(state_dict)
        given = int(state_dict["given"]) * before // now
        samplers = self._seedable_samplers()
        for sampler, seed in zip(samplers, state_dict.get("seeds", []), strict=False):
            sampler.restore_seed(int(seed))
        self.set_epoch(int(state_dict["iteration"]))
        self._progress.samples = int(state_dict.get("samples", 0))
        drawn = state_dict.get("random") if self._reads_as_then(state_dict) else None
        self._progress.restored = {**state_dict, "given": given, "random": drawn}

    def progress(self, state: Mapping[str, Any] | None = None) -> tuple[int, int, int | None]:
        """The epoch, the batches given in it, and the samples of all ranks over all epochs, by the
        present state or by another one."""
        state, size = state or self.state_dict(), self.total_batch_size
        given, lacking = state["given"], state["lacking"]
        samples = None if size is None else state["samples"] + given * size - lacking
        return state["iteration"], given, samples

    def is_part_of(self, other: ResumableLoader) -> bool:
        """Whether the two are one loader, one of them perhaps without its first batches."""
        return self._progress is other._progress

    def _seedable_samplers(self) -> list[SeedableRandomSampler]:
        return [one for one in samplers_of(self) if isinstance(one, SeedableRandomSampler)]

    def _generators(self) -> dict[str, torch.Generator]:
        named = {"workers": self.generator, "order": self.synchronized_generator}
        return {name: generator for name, generator in named.items() if generator is not None}

    def _generator_states(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self._generators().items()}

    def _num_batches(self) -> int:
        """Batches an epoch that this rank gets."""
        return super().__len__()

    @property
    def _num_readers(self) -> int:
        """How many ranks read samples of their own."""
        return self._options.num_processes

    def _count_total(self) -> int | None:
        """Batches of a whole pass, those included that this one skips; None where unknown."""
        # Torch warns of a stream that gives more batches than len() said, if somebody has asked for
        # its len(): that we asked must not count.
        asked = self._IterableDataset_len_called
        try:
            return self._num_batches()
        except (TypeError, NotImplementedError):  # as of length_or_none
            return None
        finally:
            self._IterableDataset_len_called = asked

    def _skips_complete_epoch(self) -> bool:
        """Whether the script skips the whole epoch that was complete when the state was saved.

        Scripts that count batches themselves then skip all of them. The restored state is the start
        of the next epoch, so this pass gives nothing, and the next pass uses the state.
        """
        restored = self._progress.restored
        if restored is None or restored["given"] or not self.skip_batches:
            return False
        total = self._count_total()
        if self._options.is_uneven:
            # Rank 0's total decides for all (no rank has more batches): ranks that skip while
            # others go on would wait for each other in different collectives.
            (total,) = broadcast_object_list([total])
        return total is not None and self.skip_batches >= total

    def _restore(self) -> tuple[int, int, Mapping[str, Any] | None]:
        """Go back to the start of a restored epoch.

        Returns:
            the batch to begin with, the samples that rounds before it lacked, and the random
            numbers of the pass that this one goes on with.
        """
        restored, self._progress.restored = self._progress.restored, None
        if restored is None:
            return self.skip_batches, 0, None
        for name, generator in self._generators().items():
            if name in restored["generators"]:
                generator.set_state(restored["generators"][name])
        given, asked, drawn = int(restored["given"]), self._options.skip_batches, restored["random"]
        if asked in (None, given):
            return given, restored.get("lacking", 0), drawn
        # `ahead` has the states before batch `given` was read; this pass begins with another one.
        return asked, 0, drawn and {**drawn, "ahead": []}
