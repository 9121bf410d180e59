"""Prepared loaders: torch DataLoaders whose batches are this rank's, and lie on its device.

A *pass* is one run over the loader (``for batch in loader``). From the samples to the loop::

    sampler: indices of this rank's samples
      -> IndexSource: from batch n on, where an epoch is resumed
      -> torch's own iterator, with its workers
      -> _read: batches as the dataset made them
      -> _give: one batch ahead of the loop, on the device, counted in a Position
      -> the loop

Reading one batch ahead of the loop tells, while the loop has the last batch, that it is the last
(:class:`~notebook_accel.training.data.active.Position`). What a pass costs beyond torch's own is a
few attribute reads a batch: whatever can be decided as the pass begins is decided there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from notebook_accel.errors import RunStopped
from notebook_accel.launch.rank import current
from notebook_accel.training.collectives import num_ranks, this_rank
from notebook_accel.training.data.active import LoaderProgress, Position, active_loaders
from notebook_accel.training.data.joined import copy_as
from notebook_accel.training.data.options import LoaderOptions
from notebook_accel.training.data.replay import IndexSource, Replay, seed_of_pass
from notebook_accel.training.data.resuming import ResumableLoader
from notebook_accel.training.data.samplers import (
    BatchSamplerShard,
    RoundBatch,
    ShortRound,
    length_of,
    num_samples_of,
)
from notebook_accel.training.data.streams import IterableDatasetShard, ShortRoundCollate
from notebook_accel.training.data.transfer import Transfer, make_transfer
from notebook_accel.training.data_group import DataGroup
from notebook_accel.training.nested import find_batch_size
from notebook_accel.training.seeding import new_generator, synchronize_rng_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["PreparedLoader"]

_NO_BATCH = object()
# Seeds of neighbouring ranks land far apart by multiples of 2**64 divided by the golden ratio
# (made odd), the usual constant for that (Knuth, The Art of Computer Programming, volume 3, 6.4).
_SEED_STEP = 0x9E37_79B9_7F4A_7C15


class PreparedLoader(ResumableLoader):
    """What the prepared loaders have in common: ``prepare`` makes them around the user's. How far
    they are, and how they go on there, is in their base class."""

    # What a launch tells a user who passes it one of these as an argument
    # (``launch/payload/refusals``).
    _notebook_accel_stays_home = "prepare it inside the function"

    def _make_by_hand(
        self,
        dataset: Any,
        arguments: dict[str, Any],
        *,
        torch_device_mesh: DeviceMesh | None,
        iteration: int,
        **options: Any,
    ) -> None:
        """Make a loader as torch's are made, for code that calls the class itself.

        Args:
            dataset: as torch's DataLoader.
            arguments: further ones of torch's DataLoader.
            torch_device_mesh: of the ranks, where several of them hold one model together.
            iteration: number of the first epoch.
            **options: of :class:`LoaderOptions`.
        """
        if arguments.get("generator") is None:
            # Drawn, so that loaders made one after the other have orders of their own.
            seed = int(torch.empty((), dtype=torch.int64).random_())
            arguments["generator"] = new_generator(seed)
        super().__init__(dataset, **arguments)
        data_group = DataGroup.of_all_ranks(num_ranks(), this_rank())
        if torch_device_mesh is not None:
            data_group = DataGroup.of_mesh(torch_device_mesh, this_rank())
        self._complete(LoaderOptions(data_group=data_group, **options), LoaderProgress())
        if iteration:
            self.set_epoch(iteration)

    @classmethod
    def around(cls, loader: DataLoader[Any], options: LoaderOptions) -> PreparedLoader:
        """A prepared loader with everything that ``loader`` has.

        A subclass of DataLoader stays one: what it overrides holds here too.
        """
        new = copy_as(cls, loader)
        new._complete(options, LoaderProgress())
        return new

    def skipping(self, num_batches: int) -> PreparedLoader:
        """This loader from batch ``num_batches`` of each epoch on."""
        new = copy_as(PreparedLoader, self)
        new._complete(replace(self._options, skip_batches=num_batches), self._progress)
        return new

    def _complete(self, options: LoaderOptions, progress: LoaderProgress) -> None:
        """Add what a prepared loader has beside what torch's has."""
        self._options = options
        self._progress = progress
        self._index = IndexSource(super()._index_sampler)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterator": None}  # the iterator holds worker processes

    @property
    def _index_sampler(self) -> Any:
        return self._index

    @property
    def device(self) -> torch.device | None:
        """Where batches are put; None where they stay."""
        return self._options.device

    @property
    def rng_types(self) -> tuple[str, ...]:
        """Random states that every rank takes from rank 0 at the start of a pass; if there are any,
        the generator of the order is synchronized too."""
        return self._options.rng_types

    @property
    def total_dataset_length(self) -> int:
        """Number of samples of the dataset that the loader was made with."""
        dataset: Any = self.dataset
        return length_of(dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset)

    def __len__(self) -> int:
        return max(0, self._num_batches() - self.skip_batches)

    def __iter__(self) -> Any:
        if self._skips_complete_epoch():
            return iter(())
        # In this order: restore, so that what rank 0 sends is what the checkpoint had; send; then
        # note the states (`_new_position`), which a checkpoint of this pass keeps.
        start, num_lacking, drawn = self._restore()
        self._synchronize()
        before = getattr(self._progress.position, "replay", None)
        replay = Replay(drawn, watches=not self.num_workers, before=before)
        position = self._new_position(num_given=start, num_lacking=num_lacking, replay=replay)
        self._progress.position = position
        return self._give(replay.open(partial(self._read, position)), position)

    def _synchronize(self) -> None:
        """Give every rank rank 0's random states, so that all run through the same order.

        Every rank of the world, not of the data group alone: ranks that hold one model together
        must read the same samples.
        """
        if num_ranks() == 1 or not self.rng_types:
            return
        for rng_type in self.rng_types:
            if rng_type != "generator":
                synchronize_rng_state(rng_type)
        # Also where "generator" is not among them: if each rank had its own order, their parts
        # would overlap, and some samples would never be read.
        if self.synchronized_generator is not None:
            synchronize_rng_state("generator", self.synchronized_generator)
        for sampler in self._seedable_samplers():
            sampler.agree_on_seed()

    def _get_iterator(self) -> Any:
        # Torch draws the seed of the workers from the loader's generator. That has the same state
        # on all ranks, whose workers would then augment their samples alike. So each rank that
        # reads other samples gets another seed; those that read the same ones (of one model that
        # they hold together) get the same. Without workers nothing is drawn from that seed.
        if not self.num_workers:
            return super()._get_iterator()
        own = self.generator
        seed = self._draw_seed() + self._options.process_index * _SEED_STEP
        self.generator = new_generator(seed % 2**64)
        try:
            return super()._get_iterator()
        finally:
            self.generator = own

    def _draw_seed(self) -> int:
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))

    def _read(self, position: Position) -> Iterator[Any]:
        """The batches of this rank from ``position`` on, as the dataset made them."""
        return self._read_from(position, position.num_given)

    def _read_from(
        self, position: Position, start: int, *, keeps_first: bool = False
    ) -> Iterator[Any]:
        """The batches from ``start`` on, as torch's iterator gives them.

        Args:
            position: of the pass.
            start: the first batch to read. It is not ``position.num_given`` where one rank reads
                for all.
            keeps_first: give the first batch of the epoch before them, for a reader that fills the
                last round up with its samples.
        """
        index = self._index
        index.keeps_first = keeps_first and start > 0
        index.before_start = position.replay.reach_start if start else None
        if isinstance(self.dataset, IterableDataset):
            reader = iter(super().__iter__())
            return index.skip(reader, start) if start else reader
        index.start, index.seed = start, self._seed_of_workers()
        if self.persistent_workers and self._iterator is not None:
            # Torch draws a seed whenever it makes an iterator: with workers that stay, in the first
            # pass only. The order may come from the same generator. A resumed pass always makes an
            # iterator, and must still draw the original order; so later passes draw a seed here.
            self._draw_seed()
        reader = iter(super().__iter__())
        # Torch's iterator has begun one or two passes over the sampler, and reads the newest.
        position.shard_pass = getattr(index.sampler, "newest_pass", None)
        return reader

    def _seed_of_workers(self) -> int | None:
        """The seed from which the random numbers of worker processes are seeded for each batch.

        None where there are no workers, and where the user's ``worker_init_fn`` may seed them.
        """
        if not self.num_workers or self.worker_init_fn is not None or self.generator is None:
            return None
        return seed_of_pass(self.generator, self.iteration, self._options.process_index)

    def _give(self, source: Iterator[Any], position: Position) -> Iterator[Any]:
        """The batches of ``source`` as the loop gets them, while ``position`` says where it is."""
        context = current()
        count, active, ahead = context.count_batch, active_loaders(context), position.replay.ahead
        stack, total, progress = active.stack, self._count_total(), self._progress
        send, receive = self._transfer(position)
        is_stream = isinstance(self._shard, IterableDatasetShard)
        size = self.total_batch_size or 0 if is_stream else 0
        position.loader = self
        if send is not None:
            source = map(send, source)
        try:
            batch = next(source, _NO_BATCH)
            if batch is not _NO_BATCH and receive is not None:
                batch = receive(batch)
            # One ahead of the loop: where none follows, `batch` is the last one, which closes a
            # window of accumulation and may have repeated samples.
            for following in source:
                progress.position = position  # another pass over this loader may have begun
                # Before the batch is given: where the run is to stop this raises RunStopped, on
                # all ranks at the same count.
                count(total, position.num_given + 1)
                if not stack or stack[-1] is not position:
                    active.put_on_top(position)
                position.num_given += 1
                if size and position.short_round is not None:
                    # Not the last round of all: several workers read, and each ends its own part.
                    position.num_lacking += size - position.short_round.num_samples
                if ahead:
                    del ahead[0]
                yield batch
                batch = following if receive is None else receive(following)
            progress.position = position
            if batch is not _NO_BATCH:
                # Before the end is noted: a loop that is stopped here has not had the last batch.
                count(total, position.num_given + 1)
            self._reach_end(position, batch)
            if batch is not _NO_BATCH:
                active.put_on_top(position)
                position.num_given += 1
                del ahead[:1]
                yield batch
        except RunStopped:
            active.stop(position)
            raise
        finally:
            # Also where the loop is left by `break`: a pass that nobody goes on with must not
            # answer for a loader that another loop reads.
            active.drop(position)
            position.is_over = True
            position.loader = None

    def _reach_end(self, position: Position, batch: Any) -> None:
        """Note that nothing follows, what the last round lacks, and that the next epoch comes.

        Args:
            position: of the pass.
            batch: the last one, which the loop gets next.
        """
        position.end_of_dataloader = True
        num_batches = position.num_given + (batch is not _NO_BATCH)
        if batch is _NO_BATCH:  # skip_first_batches may have been asked for more than there are
            total = self._count_total()
            num_batches = num_batches if total is None else min(num_batches, total)
        size, lacking = self.total_batch_size or 0, self._num_lacking_at_the_end
        self._note_last_round(position)
        if position.short_round is None and self._options.num_processes == 1 and lacking:
            num_own = size - lacking
            if find_batch_size(batch) == num_own:  # a sampler may give more than its length says
                position.short_round = ShortRound(num_own, num_own, num_own)
                position.remainder = num_own
        if position.short_round is None and self._knows_repeats:
            position.remainder = 0
        last = position.short_round
        # A last round of which this rank gets nothing counts as well.
        num_rounds = num_batches + (last is not None and last.batch_size == 0)
        self._progress.samples += size * num_rounds
        self._progress.samples -= position.num_lacking
        if position.remainder > 0:
            self._progress.samples += position.remainder - size
        elif last is None and num_batches:
            self._progress.samples -= lacking
        # Now rather than as the next pass begins: code that calls set_epoch of a sampler or a
        # dataset itself, before each pass, has the last word.
        self.set_epoch(position.epoch + 1)

    @property
    def _num_lacking_at_the_end(self) -> int:
        """By how many samples the last round is short, where nothing fills it up; 0 where that is
        not known."""
        samples, size = self._num_samples, self.total_batch_size
        if samples is None or size is None or self._index.sampler.drop_last:
            return 0
        return -samples % size

    @property
    def _num_samples(self) -> int | None:
        """Samples that all ranks read in a pass; None where that is not known."""
        is_stream = isinstance(self.dataset, IterableDataset)
        own = None if is_stream else num_samples_of(self._index.sampler)
        return None if own is None else own * self._num_readers

    @property
    def _knows_repeats(self) -> bool:
        """Whether this loader is told of repeated samples: if it hears of none, there are none."""
        is_shared_out = hasattr(self._shard, "newest_pass") or self._marks_last_round
        return is_shared_out or self._options.num_processes == 1

    def _transfer(self, position: Position) -> Transfer:
        """What is done with each batch on its way to the loop."""
        send, move = make_transfer(self._options.device, self._options.non_blocking)
        shard = self._shard
        is_split = isinstance(shard, BatchSamplerShard) and shard.split_batches
        if not (self._marks_last_round or is_split):
            return Transfer(send, move)

        def receive(batch: Any) -> Any:
            batch = batch if move is None else move(batch)
            repeats = position.shard_pass.repeats if is_split and position.shard_pass else {}
            position.short_round, is_uneven = repeats.pop(position.num_given, None), None
            if type(batch) is RoundBatch:
                batch, position.short_round, is_uneven = batch
            if position.short_round is not None:
                position.remainder = position.short_round.num_samples
            if is_uneven is not None:
                position.is_uneven = is_uneven
            return batch

        return Transfer(send, receive)

    @property
    def _marks_last_round(self) -> bool:
        return isinstance(self.collate_fn, ShortRoundCollate)
