"""Which samples of a stream (an iterable dataset) each rank gets, if every rank reads all of it.

The stream is divided into rounds: a round is the samples on which all ranks work at the same step.
Each rank takes its own part of each round and drops the rest. A stream has no indices, so the
dropped samples have to be read, too.

If the last round is incomplete, the loader needs its sample counts (``ShortRound``): the number of
its samples, of those in this rank's batch, and of those there that are not repeated. The stream may
run in a worker process, which sends nothing but samples. So the counts travel with the samples::

    IterableDatasetShard: sample -> (sample, ShortRound)
      -> ShortRoundCollate: samples -> RoundBatch(batch, ShortRound)
      -> the loader, which takes the batch out
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from notebook_accel.errors import ConfigError
from notebook_accel.training.data.samplers import RoundBatch, length_or_none, own_parts, share_of
from notebook_accel.training.stepping.active_loaders import ShortRound


class _ShortRoundSample(NamedTuple):
    """A sample of an incomplete last round, with the sample counts of that round."""

    sample: Any
    short_round: ShortRound


class ShortRoundCollate:
    """Wraps a ``collate_fn``: samples of an incomplete round become a :class:`RoundBatch`."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        first = samples[0] if isinstance(samples, list) and samples else samples
        if type(first) is not _ShortRoundSample:
            return self.collate(samples)
        plain = samples.sample if samples is first else [each.sample for each in samples]
        return RoundBatch(self.collate(plain), first.short_round)


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one rank, from an iterable dataset that every rank reads completely.

    Below, a round is the samples on which all ranks work at the same step.

    Args:
        dataset: the stream, which gives the same samples in the same order on every rank.
        batch_size: batch size of the loader; None if each item of the dataset is a whole batch.
        drop_last: leave out the last round if it lacks samples.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: True: divide each batch over the ranks. False: give whole batches to the
            ranks in turn.
        even_batches: fill up the last round with samples from the start of the stream.
        marks_last_round: yield each sample of a last round that lacks samples together with the
            sample counts of that round; :class:`ShortRoundCollate` separates them again.

    Raises:
        ConfigError: ``split_batches`` is set, and ``batch_size`` is None or not a multiple of
            ``num_processes``.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int | None = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        *,
        marks_last_round: bool = False,
    ) -> None:
        self.dataset: Any = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.marks_last_round = marks_last_round
        # While a rank has a batch, the dataset has given all samples of its round and none of the
        # next: so its own state says how far this is. (Attributes, since torchdata asks for them.)
        for name in ("state_dict", "load_state_dict"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        if split_batches and batch_size is None:
            raise ConfigError(
                f"split_batches=True divides batches over {num_processes} processes, but this "
                "loader has batch_size=None, so that its dataset makes the batches: give it a "
                "batch size, let rank 0 read and divide them (dispatch_batches=True), or leave "
                "split_batches out"
            )
        # Without a batch size each sample is a batch that the dataset has made.
        share = 1 if batch_size is None else share_of(batch_size, num_processes, split_batches)
        self._samples_a_round = share * num_processes
        self._own_part = slice(share * process_index, share * (process_index + 1))

    @property
    def is_uneven(self) -> bool:
        """Whether ranks may get batches of different sizes at the same step."""
        is_filled = self.even_batches or self.drop_last
        return self.num_processes > 1 and not (is_filled and self.batch_size)

    @property
    def remainder(self) -> int:
        """Number of samples of all ranks in an incomplete last round, repeated ones not counted.

        It is 0 if the last round is full, and -1 with ``drop_last`` or if the number is unknown.
        """
        # A stream that makes its batches itself counts batches, of whatever size.
        is_unknown = self.drop_last or self.batch_size is None
        length = None if is_unknown else length_or_none(self.dataset)
        return -1 if length is None else length % self._samples_a_round

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset the number of the next epoch, if it has a method ``set_epoch``."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self._samples_a_round)
        share = self._samples_a_round // self.num_processes
        if self.drop_last or not rest:
            return whole * share
        if self.even_batches:
            return (whole + 1) * share
        return whole * share + len(range(rest)[self._own_part])

    def __iter__(self) -> Iterator[Any]:
        size, own, fills = self._samples_a_round, self._own_part, self.even_batches
        parts = own_parts(iter(self.dataset), size, own, fills=fills, drops=self.drop_last)
        for part, short in parts:
            if short is None or not self.marks_last_round:
                yield from part
                continue
            # Of batches that the dataset has made, the size is unknown.
            is_known = self.batch_size is not None
            marked = short if is_known else ShortRound(-1, None, short.num_own_samples)
            yield from (_ShortRoundSample(sample, marked) for sample in part)
