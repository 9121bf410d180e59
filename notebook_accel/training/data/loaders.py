"""Prepared loaders: torch DataLoaders that give this rank's batches, on its device.

A prepared loader keeps a loader of torch inside (``base_dataloader``), of the user's own class, and
runs it. From the samples to the loop::

    sampler: indices of this rank's samples
      -> IndexSource: from batch n on, where an epoch is resumed
      -> the loader inside, with its workers
      -> _read: batches as the dataset made them
      -> __iter__: one batch ahead of the loop, on the device, counted in a Position
      -> the loop

Reading one batch ahead of the loop tells, while the loop has the last batch, that it is the last
(``Position``). Whatever can be decided once per pass (run over the loader) is decided when a pass
begins, so that a batch costs only a few attribute reads more than with torch's own loader.

How an epoch is resumed in its middle (batches are counted from 0)::

    loop has batch n    state_dict() -> the epoch, n + 1 batches given, and the random states
                                        from which the order of the epoch was drawn
    load_state_dict()   sets the epoch; keeps the rest for the pass that comes next
    next pass           _restore() -> the random states are set, and batch n + 1 is its first

The place in an epoch is the number of batches that this rank has got, plus those that
``skip_first_batches`` left out. The saved random states give the same order of samples again, so
this number determines the samples. Worker processes draw the same numbers in a resumed epoch
(``IndexSource``). A dataset that is read in the rank's own process draws from the random states
of the training: the batch that was read ahead draws other numbers when it is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset

from notebook_accel.errors import RunStopped
from notebook_accel.rank.this_rank import current
from notebook_accel.training.collectives import broadcast_object_list, num_ranks, this_rank
from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.collectives.nested import send_to_device
from notebook_accel.training.data import samplers
from notebook_accel.training.data.loader_wrapper import LoaderWrapper, new_loader
from notebook_accel.training.processes import devices
from notebook_accel.training.processes.random_numbers import (
    get_random_states,
    new_generator,
    set_random_states,
    synchronize_rng_state,
)
from notebook_accel.training.stepping.accumulation import Accumulation, GradientState
from notebook_accel.training.stepping.active_loaders import (
    LoaderProgress,
    Position,
    ShortRound,
    active_loaders,
)
from notebook_accel.training.stepping.step_timer import step_timer

_NO_BATCH = object()
# Seeds of neighbouring ranks land far apart by multiples of 2**64 divided by the golden ratio
# (made odd), the usual constant for that (Knuth, The Art of Computer Programming, volume 3, 6.4).
_SEED_STEP = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The settings of a prepared loader that torch's ``DataLoader`` does not have."""

    device: torch.device | None = None
    """Where batches are put; None leaves them where they are."""

    non_blocking: bool = False
    """Whether the copies to the device run beside the loop's work."""

    rng_types: tuple[str, ...] = ()
    """Random states that every rank takes from rank 0 at the start of a pass. If there are any, the
    state of ``synchronized_generator`` is taken from rank 0 too."""

    generator: torch.Generator
    """The loader's generator, from which each pass draws the seed of its workers."""

    synchronized_generator: torch.Generator | None = None
    """The generator that the order comes from, where there is one."""

    data_group: DataGroup = field(default_factory=partial(DataGroup.of_all_ranks, 1, 0))
    """Which ranks read different samples."""

    split_batches: bool = False
    """Whether each batch of the loader is divided over the ranks."""

    is_uneven: bool = False
    """Whether ranks may get batches of different sizes; what a sampler or dataset of ours says of
    itself (its ``is_uneven``) goes before this."""

    slice_fn: Callable[..., Any] | None = None
    """The user's way of taking one rank's part out of what rank 0 has read for all."""

    skip_batches: int | None = None
    """The batch to begin each epoch with; None is the first, or that of a restored state."""


class PreparedLoader(LoaderWrapper):
    """Base class of the loaders that ``prepare`` makes around the user's loaders.

    A prepared loader gives this rank's batches on the rank's device, and can save and restore its
    place in the epoch. ``DataLoaderShard`` lets each rank read its own samples;
    ``DataLoaderDispatcher`` lets rank 0 read for all.
    """

    # What a launch tells a user who passes it one of these as an argument
    # (``launch/payload/refusals``).
    _notebook_accel_stays_home = "prepare it inside the function"
    accumulation: Accumulation | None = None
    """Gradient accumulation of the Accelerator that prepared it; None: of the newest one."""

    def _make_by_hand(
        self,
        dataset: Any,
        use_stateful: bool,
        arguments: dict[str, Any],
        *,
        torch_device_mesh: DeviceMesh | None,
        iteration: int,
        **options: Any,
    ) -> None:
        """Initialise this loader from arguments like those of torch's ``DataLoader``."""
        if arguments.get("generator") is None:
            # Drawn, so that loaders made one after the other have orders of their own.
            seed = int(torch.empty((), dtype=torch.int64).random_())
            arguments["generator"] = new_generator(seed)
        base = new_loader(dataset, use_stateful, arguments)
        data_group = DataGroup.of(torch_device_mesh, num_ranks(), this_rank())
        generator = arguments["generator"]
        self._wrap(base, LoaderOptions(data_group=data_group, generator=generator, **options))
        if iteration:
            self.set_epoch(iteration)

    @classmethod
    def around(cls, base: DataLoader[Any], options: LoaderOptions) -> PreparedLoader:
        """Return a prepared loader that keeps ``base`` inside and reads from it.

        ``base`` is changed, so it must have no other user.
        """
        new = cls.__new__(cls)
        new._wrap(base, options)
        return new

    def skipping(self, num_batches: int) -> PreparedLoader:
        """Return a loader like this one that leaves out the first ``num_batches`` of each epoch.

        Both loaders share one epoch number and one place in the epoch.
        """
        new = type(self).__new__(type(self))
        vars(new).update(vars(self), _options=replace(self._options, skip_batches=num_batches))
        return new

    def _wrap(self, base: DataLoader[Any], options: LoaderOptions) -> None:
        self.base_dataloader = base
        self.device, self.rng_types = options.device, options.rng_types
        self.generator = options.generator
        self.synchronized_generator = options.synchronized_generator
        self._options = options
        self._progress = LoaderProgress()
        name = "sampler" if base.batch_sampler is None else "batch_sampler"
        self._index = vars(base)[name] = samplers.IndexSource(getattr(base, name))
        base.generator = new_generator(0)  # seeded as each pass begins

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return found.sampler if isinstance(found, samplers.IndexSource) else found

    # What it is, and where it stands.

    @property
    def skip_batches(self) -> int:
        """Number of batches that are left out at the start of each epoch."""
        return self._options.skip_batches or 0

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples that all ranks together get in a full step; None if unknown."""
        size = self.given_batch_size
        if size is None or self._options.split_batches:
            return size
        return size * self._options.data_group.size

    @property
    def own_batch_size(self) -> int | None:
        """Number of samples that this rank gets in a full step; None if unknown."""
        size = self.total_batch_size
        return None if size is None else size // self._options.data_group.size

    @property
    def given_batch_size(self) -> int | None:
        """The batch size that the user's loader was made with; None if it has none."""
        parts = (self._shard, self._index.sampler, self)
        return next(filter(None, (getattr(part, "batch_size", None) for part in parts)), None)

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the whole dataset, before it is divided among the ranks."""
        dataset: Any = self.dataset
        is_ours = isinstance(dataset, samplers.IterableDatasetShard)
        return len(dataset.dataset if is_ours else dataset)

    @property
    def gradient_state(self) -> GradientState:
        """The ``GradientState`` of the Accelerator that prepared this loader, or of the newest."""
        return GradientState(accumulation=self.accumulation)

    def get_sampler(self) -> Any:
        """Return the sampler of single indices in the batch sampler; None if there is none."""
        return samplers.get_sampler(self)

    @property
    def iteration(self) -> int:
        """Number of the running epoch, from 0; of the next one once the loop has the last batch."""
        return self._progress.iteration

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch in this loader, its samplers and its dataset."""
        self._progress.iteration = epoch
        # These only pass it on to what is inside.
        ours = (samplers.BatchSamplerShard, samplers.SkipBatchSampler)
        users = [sampler for sampler in samplers.samplers_of(self) if not isinstance(sampler, ours)]
        for part in (*users, self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __len__(self) -> int:
        return max(0, self._num_batches() - self.skip_batches)

    def _num_batches(self) -> int:
        """Return the number of batches that this rank gets in an epoch if it skips none."""
        return len(self.base_dataloader)

    def _count_total(self) -> int | None:
        """Return this rank's batches in a complete epoch, skipped ones too; None if unknown."""
        # Torch warns of a stream that gives more batches than len() said, if somebody has asked for
        # its len(): that we asked must not count.
        noted = vars(self.base_dataloader)
        before = dict(noted)
        try:
            return self._num_batches()
        except (TypeError, NotImplementedError):  # as of samplers.length_or_none
            return None
        finally:
            noted.update(before)

    @property
    def _shard(self) -> Any:
        """The part that may divide the samples: the dataset or the sampler."""
        # A user's own dataset knows nothing of it.
        is_ours = isinstance(self.dataset, samplers.IterableDatasetShard)
        return self.dataset if is_ours else self._index.sampler

    @property
    def _batches_a_round(self) -> int:
        return 1 if self._options.split_batches else self._options.data_group.size

    @property
    def _batches_a_step(self) -> int:
        """Batches read for each that the loop gets: more than 1 where rank 0 reads for all."""
        return max(1, self._batches_a_round // self._num_readers)

    @property
    def _drops_last(self) -> bool:
        # DataLoader(batch_sampler=...).drop_last is always False; the batch sampler's own counts.
        return bool(getattr(self._index.sampler, "drop_last", self.drop_last))

    @property
    def _num_readers(self) -> int:
        """Number of ranks that read different samples; 1 where rank 0 reads for all."""
        return self._options.data_group.size

    @property
    def _marks_last_round(self) -> bool:
        """Whether :meth:`_read` may yield a :class:`RoundBatch`, which has sample counts too."""
        return isinstance(self.collate_fn, samplers.ShortRoundCollate)

    # One pass.

    def __iter__(self) -> Any:
        # A generator: nothing is done before the loop asks for its first batch.
        current().begin_training()
        if self._skips_complete_epoch():
            return
        position, source, receive = self._begin_pass()
        progress, context = self._progress, current()
        count, active, total = context.count_batch, active_loaders(context), self._count_total()
        stack, timer = active.stack, step_timer(context)
        position.loader = self
        try:
            timer.drop()
            batch = next(source, _NO_BATCH)
            timer.get_batch()
            # Torch's iterator has begun one or two passes over the sampler, and reads the newest.
            position.shard_pass = getattr(self._index.sampler, "newest_pass", None)
            if batch is not _NO_BATCH and receive is not None:
                batch = receive(batch)
            while batch is not _NO_BATCH:
                # Before the batch is given, and before the next is read: where the run is to stop
                # this raises RunStopped, on all ranks at the same count.
                count(total, position.num_given + 1)
                # One ahead of the loop: where none follows, `batch` is the last one, which closes
                # a window of accumulation and may have repeated samples.
                timer.ask_for_batch()
                following = next(source, _NO_BATCH)
                timer.get_batch()
                progress.position = position  # another pass over this loader may have begun
                if following is _NO_BATCH:
                    self._reach_end(position)
                if not stack or stack[-1] is not position:
                    active.drop(position)
                    stack.append(position)
                position.num_given += 1
                yield batch
                batch = following
                if receive is not None and batch is not _NO_BATCH:
                    batch = receive(batch)
            if not position.end_of_dataloader:  # there was no batch at all
                progress.position = position
                self._reach_end(position)
        except BaseException as error:
            # An interrupt closes this generator, unless it comes in here.
            if isinstance(error, RunStopped) or context.is_interrupted:
                active.stop(position)
            raise
        finally:
            # Also where the loop is left by `break`: a pass that nobody goes on with must not
            # answer for a loader that another loop reads.
            active.drop(position)
            position.loader = None
            timer.drop()

    def _begin_pass(self) -> tuple[Position, Iterator[Any], Callable[[Any], Any] | None]:
        """Begin to read: return the position, its batches, and what each goes through (or None)."""
        # In this order: restore, so that what rank 0 sends is what the checkpoint had; send; then
        # note the states, which a checkpoint of this pass keeps.
        start, restored = self._restore()
        self._synchronize()
        is_counted = self._options.data_group.size == 1 or hasattr(self._shard, "is_uneven")
        num_samples = self._num_samples if is_counted and not self._drops_last else None
        position = Position(
            epoch=self._progress.iteration,
            num_given=start,
            num_in_blocks=start,
            at_step=start,
            is_after_step=restored.get("begin") is not None,
            begin=get_random_states(),
            remainder=-1 if num_samples is None else num_samples % (self.total_batch_size or 1),
            is_uneven=getattr(self._shard, "is_uneven", self._options.is_uneven),
            generators=self._generator_states(),
            reader_states=dict(restored.get("reader") or {}),
        )
        # Draw the seed of the worker processes, as torch's loader does. The generator has the same
        # state on all ranks, so each share of the data gets another seed, lest the workers of all
        # ranks augment their samples alike.
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
        seed = (drawn + self._options.data_group.index * _SEED_STEP) % 2**64
        self.base_dataloader.generator.manual_seed(seed)
        is_ours = self.num_workers and self.worker_init_fn is None
        self._index.seed = seed if is_ours else None
        self._progress.position = position
        begin = restored.get("begin")
        if begin is None:
            return position, self._read(position), self._receiver(position)
        # The order comes from where the pass began: a sampler without a generator draws it from
        # the global random numbers, when it is asked for its first index.
        now, position.begin = position.begin, begin
        set_random_states(begin, devices.HOST)
        source = self._read(position)
        first = list(islice(source, 1))
        set_random_states(now, devices.HOST)
        return position, chain(first, source), self._receiver(position)

    def _synchronize(self) -> None:
        """Copy rank 0's random states to every rank, so that all use one order; all ranks call it.

        All ranks of the world take part, not only this rank's data group: ranks that hold one model
        together must read the same samples. If ``rng_types`` is empty, nothing is copied.
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
            if not sampler.is_agreed:
                # With other orders on other ranks, samples would be read twice, and others never.
                (sampler.initial_seed,) = broadcast_object_list([sampler.initial_seed])
                sampler.is_agreed = True

    def _read(self, position: Position) -> Iterator[Any]:
        """Return the batches of this rank from ``position`` on, as the dataset made them."""
        return self._read_from(position, position.num_given)

    def _read_from(
        self, position: Position, start: int, keeps_first: bool = False
    ) -> Iterator[Any]:
        """Return the batches of the loader inside, from batch ``start`` of the epoch on.

        Args:
            position: the state of this pass, which has the saved states of the dataset.
            start: number of the first batch to read. It differs from ``position.num_given`` where
                rank 0 reads the batches of all ranks.
            keeps_first: yield the first batch of the epoch too, ahead of batch ``start``, because
                its samples are to fill up the last round.
        """
        base, index = self.base_dataloader, self._index
        keeps_states = self.use_stateful_dataloader and hasattr(self.dataset, "state_dict")
        is_counted = keeps_states or isinstance(self.dataset, IterableDataset)
        index.start = 0 if is_counted else start
        index.keeps_first = keeps_first
        state = position.reader_states.get(start)
        if keeps_states:
            base.load_state_dict(state or {})  # type: ignore[attr-defined]
        reader: Iterator[Any] = iter(base)
        if is_counted and start and state is None:
            reader = samplers.skip(reader, start, keeps_first)
        if not keeps_states:
            return reader
        skips = start > 0 and state is None
        return self._note_reader_states(reader, position, start, skips and keeps_first)

    def _note_reader_states(
        self, reader: Iterator[Any], position: Position, start: int, keeps_first: bool
    ) -> Iterator[Any]:
        """Yield the batches of ``reader``, and store the dataset's state after each of them.

        The newest states are kept in ``position.reader_states``, by the number of batches read.
        Several are kept because the loader reads ahead: a checkpoint needs the state after the
        batch that the loop has. ``start`` is the number of batches that the epoch has had before.
        With ``keeps_first``, ``reader`` begins with the first batch of the epoch, for which no
        state is stored.
        """
        base: Any = self.base_dataloader
        if keeps_first:
            yield from islice(reader, 1)
        for number, batch in enumerate(reader, start + 1):
            position.reader_states[number] = base.state_dict()
            position.reader_states.pop(number - 2 * self._batches_a_step - 1, None)
            yield batch

    def _receiver(self, position: Position) -> Callable[[Any], Any] | None:
        """Return what each batch goes through before the loop gets it; None if nothing."""
        device, non_blocking = self.device, self._options.non_blocking
        move: Callable[[Any], Any] | None = None
        is_only_device = device == devices.HOST and not torch.accelerator.is_available()
        if device is not None and not is_only_device:
            to_device = partial(send_to_device, device=device, non_blocking=non_blocking)
            driver = devices.driver(device.type)
            mark = driver and driver.begin_batch
            move = to_device if mark is None else lambda batch: (mark(), to_device(batch))[1]
        if not self._marks_last_round:
            return move

        def receive(batch: Any) -> Any:
            batch = batch if move is None else move(batch)
            position.short_round, is_uneven = None, None
            if type(batch) is samplers.RoundBatch:
                batch, position.short_round, is_uneven = batch
            if position.short_round is not None:
                position.remainder = position.short_round.num_samples
            if is_uneven is not None:
                position.is_uneven = is_uneven
            return batch

        return receive

    def _reach_end(self, position: Position) -> None:
        """Store in ``position`` that no batch follows, before the loop gets the last one."""
        position.end_of_dataloader = True
        # What the sampler has found once it has no more.
        found = position.shard_pass or getattr(self._shard, "newest_pass", None)
        if found is not None:
            position.short_round = found.last_round
        if position.short_round is not None:
            position.remainder = position.short_round.num_samples
        elif self._options.data_group.size == 1:
            position.remainder = rest = max(0, position.remainder)
            position.short_round = ShortRound(rest, rest, rest) if rest else None
        elif found is not None or self._marks_last_round:
            position.remainder = 0  # it would have been told of a last round that is not full
        # Now rather than as the next pass begins: code that calls set_epoch of a sampler or a
        # dataset itself, before each pass, has the last word.
        self.set_epoch(position.epoch + 1)

    @property
    def _num_samples(self) -> int | None:
        """Number of samples of all ranks in an epoch; None if unknown."""
        dataset: Any = self.dataset
        if isinstance(dataset, samplers.IterableDatasetShard):
            length = samplers.length_or_none(dataset.dataset)
        elif isinstance(dataset, IterableDataset):
            length = samplers.length_or_none(dataset)
        else:
            sampler = self._index.sampler
            if isinstance(sampler, samplers.BatchSamplerShard):
                length = sampler.num_samples
            else:
                is_known = not samplers.has_own_batches(sampler)
                length = samplers.length_or_none(sampler.sampler) if is_known else None
                length = length and length * self._num_readers
        size = self.total_batch_size
        if length is None or size is None:
            return None
        return length // size * size if self._drops_last else length

    # The newest pass: the one that began or gave a batch last.

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the newest pass (run over this loader) has given its last batch."""
        return self._progress.position.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of samples of all ranks in an incomplete last step, repeated ones not counted.

        It is 0 if the last step of the newest pass is full, and -1 if that is not known.
        """
        return self._progress.position.remainder

    @property
    def is_iterated(self) -> bool:
        """Whether a loop over this loader is under way."""
        return self._progress.position.loader is not None

    # Its state, and going on from one.

    def state_dict(self) -> dict[str, Any]:
        """Return a state from which :meth:`load_state_dict` resumes the epoch at the next batch.

        The state has the number of the epoch, the random states at its start, and the number of
        batches given so far. While the loop has the last batch, the state is that of the start of
        the next epoch. After a ``break`` it is that of the start of the same epoch, and after a
        stop of the run that of the batch at which the run stopped.
        """
        return self.state(at_step=False)

    def state(self, *, at_step: bool) -> dict[str, Any]:
        """Return the state as of now (:meth:`state_dict`), or as of the last optimizer step.

        A checkpoint holds no gradients. Between two optimizer steps of gradient accumulation it
        therefore saves the state at the last step, from which the batches since then are read
        again. If the pass has had no step, that is the state at its start; if no pass is running,
        that of :meth:`state_dict`.
        """
        progress, position = self._progress, self._progress.position
        state: dict[str, Any] = {
            "iteration": progress.iteration,
            "given": 0,
            "generators": {},
            "begin": None,
            "reader": None,
        }
        if progress.restored is not None:
            state |= {name: progress.restored[name] for name in state if name != "iteration"}
        elif (
            position.end_of_dataloader and not (at_step and position.at_step < position.num_given)
        ) or (position.loader is None and not position.is_stopped):
            state["generators"] = self._generator_states()
        else:
            given = position.at_step if at_step else position.num_given
            # A window that began with this pass begins it anew.
            has_begun = position.is_after_step or not at_step
            num_read = given * self._batches_a_step
            reader = None if at_step else position.reader_states.get(num_read)
            state |= {
                "iteration": position.epoch,
                "given": given,
                "generators": position.generators,
                "begin": position.begin if has_begun else None,
                "reader": reader and {num_read: reader},
            }
        return {
            **state,
            "seeds": [sampler.initial_seed for sampler in self._seedable_samplers()],
            "total_batch_size": self.total_batch_size,
            "batches_a_round": self._batches_a_round,
            "num_readers": self._num_readers,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict`; the next pass gives the rest of the state's epoch.

        If a step had another number of samples when the state was saved (more ranks, say), the next
        pass begins with the batch that holds the first sample not yet seen.
        """
        # How much a step took: samples, or batches where these are unknown.
        before, now = state_dict.get("total_batch_size"), self.total_batch_size
        if not (before and now):
            now = self._batches_a_round
            before = state_dict.get("batches_a_round", now)
        restored = {"begin": None, "reader": None, **state_dict}
        restored["given"] = int(state_dict["given"]) * int(before) // now
        num_readers = self._num_readers
        if before != now or state_dict.get("num_readers", num_readers) != num_readers:
            # This rank reads other samples at each step than then.
            restored |= {"begin": None, "reader": None}
        seeds = state_dict.get("seeds", [])
        for sampler, seed in zip(self._seedable_samplers(), seeds, strict=False):
            sampler.initial_seed, sampler.is_agreed = int(seed), True
        self.set_epoch(int(state_dict["iteration"]))
        self._progress.restored = restored

    def progress(self, state: Mapping[str, Any] | None = None) -> tuple[int, int, int | None]:
        """Return how far this loader has come, or had come when ``state`` was saved.

        Args:
            state: a state from :meth:`state_dict`; None for the present one.

        Returns:
            The number of the epoch (from 0), the number of its batches that this rank has got, and
            the number of samples that all ranks have got over all epochs (None if unknown).
        """
        state, size, an_epoch = state or self.state_dict(), self.total_batch_size, self._num_samples
        epoch, given = state["iteration"], state["given"]
        if size is None or an_epoch is None:
            return epoch, given, None
        return epoch, given, epoch * an_epoch + min(given * size, an_epoch)

    def is_part_of(self, other: PreparedLoader) -> bool:
        """Return whether ``other`` is the same loader, apart from ``skip_first_batches``."""
        return self._progress is other._progress

    def _skips_complete_epoch(self) -> bool:
        """Return whether this pass must give no batch, since its epoch was complete when saved.

        A script that counts batches itself skips all batches of an epoch if the state was saved at
        the last of them. That state is the start of the next epoch, so the next pass has to use
        it. If ranks may have different numbers of batches, all ranks call this together.
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

    def _restore(self) -> tuple[int, Mapping[str, Any]]:
        """Set the generators to the state that ``load_state_dict`` has loaded, if there is one.

        Returns:
            The number of the batch to begin with (from 0), and the loaded state, for its parts
            other than generators; an empty state if none was loaded.
        """
        restored, self._progress.restored = self._progress.restored, None
        if restored is None:
            return self.skip_batches, {}
        for name, generator in self._generators().items():
            if name in restored["generators"]:
                generator.set_state(restored["generators"][name])
        given, asked = int(restored["given"]), self._options.skip_batches
        return (given if asked is None else asked), restored

    def _seedable_samplers(self) -> list[samplers.SeedableRandomSampler]:
        found = samplers.samplers_of(self)
        return [one for one in found if isinstance(one, samplers.SeedableRandomSampler)]

    def _generators(self) -> dict[str, torch.Generator]:
        named = {"workers": self.generator, "order": self.synchronized_generator}
        return {name: generator for name, generator in named.items() if generator is not None}

    def _generator_states(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self._generators().items()}


class DataLoaderShard(PreparedLoader):
    """A prepared loader from which each rank reads its own batches.

    ``prepare`` makes it from a ``DataLoader``. If you make it by hand, it divides nothing: each
    rank gets all samples that its samplers give.

    Args:
        dataset: the dataset, as for torch's ``DataLoader``.
        device: device of the batches; None leaves them where they are.
        rng_types: names of random states that every rank takes from rank 0 when an epoch begins.
        synchronized_generator: the generator from which the order of samples is drawn. Every rank
            takes the state of this generator from rank 0, too, unless ``rng_types`` is empty.
        skip_batches: number of batches to skip at the start of each epoch.
        use_stateful_dataloader: keep torchdata's ``StatefulDataLoader`` inside, which saves and
            restores the state of a dataset that has ``state_dict``.
        _drop_last: without effect; pass torch's ``drop_last`` instead.
        _non_blocking: copy from pinned memory while the CPU continues.
        torch_device_mesh: mesh of the ranks, if several of them hold one model together; these read
            the same batches.
        iteration: number of the epoch to begin with; 0 is the first.
        **kwargs: further arguments of torch's DataLoader.

    Raises:
        ConfigError: ``use_stateful_dataloader`` is set, and torchdata is not installed.

    Example:
        >>> import torch
        >>> from notebook_accel import Accelerator, DataLoaderShard
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(8))
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=4)
        >>> loader = Accelerator().prepare(loader)
        >>> isinstance(loader, DataLoaderShard), len(loader)
        (True, 2)
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Iterable[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: DeviceMesh | None = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        self._make_by_hand(
            dataset,
            use_stateful_dataloader,
            kwargs,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            device=device,
            rng_types=tuple(rng_types or ()),
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches or None,
            non_blocking=_non_blocking,
        )
