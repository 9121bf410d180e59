"""Loaders whose dataset says itself how far it is, by torchdata's ``StatefulDataLoader``.

A prepared loader that goes on in the middle of an epoch counts: it reads what was read before, and
leaves it out. A dataset with ``state_dict`` and ``load_state_dict`` (a stream over many files, say)
can do without. Torchdata collects its state, from worker processes too, with each batch::

    batches read     1   2   3   4
    kept states          2   3   4
    the loop has             ^

Kept: the state after the newest batch and after the ``2 * _batches_a_step`` batches before it (the
picture has ``_batches_a_step`` = 1), since the loader reads ahead of the loop; ``state_dict`` takes
the one after the batch that the loop has.

The state belongs to a rank: ranks may read different files.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from notebook_accel.errors import ConfigError
from notebook_accel.training.data.dispatch import DataLoaderDispatcher
from notebook_accel.training.data.joined import add_classes, copy_as
from notebook_accel.training.data.loaders import PreparedLoader
from notebook_accel.training.data.resuming import ResumableLoader
from notebook_accel.training.data.shard import DataLoaderShard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from notebook_accel.training.data.active import Position

__all__ = ["StatefulDispatcher", "StatefulShard", "as_stateful", "make_stateful"]


def as_stateful(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of ``loader`` that is torchdata's ``StatefulDataLoader`` too.

    Raises:
        ConfigError: torchdata is not installed.
    """
    new = copy_as(type(loader), loader)
    add_classes(new, type(loader), _class_of_torchdata())
    # What its __init__ sets beside what DataLoader's does.
    vars(new).update(
        snapshot_every_n_steps=1, next_iter_state=None, _initial_iter_for_state_dict=False
    )
    return new


def make_stateful(loader: DataLoader[Any], kind: type[DataLoader[Any]]) -> None:
    """Let a loader that is made by hand be of ``kind``, and torchdata's too.

    Its ``__init__`` calls this before those of its base classes. A class that the user derived from
    ours stays among them.

    Raises:
        ConfigError: torchdata is not installed.
    """
    add_classes(loader, kind, _class_of_torchdata())


def _class_of_torchdata() -> type[DataLoader[Any]]:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise ConfigError(
            "use_stateful_dataloader=True needs torchdata's StatefulDataLoader, which could not be "
            f"imported ({error}): pip install torchdata, or leave it out"
        ) from error
    kind: type[DataLoader[Any]] = StatefulDataLoader
    return kind


class _KeepsReaderState(PreparedLoader):
    """Part of a prepared loader that is torchdata's too: keeps the state of what is read."""

    _batches_a_step = 1
    """Batches that are read for one that the loop gets."""

    def _read_from(
        self, position: Position, start: int, *, keeps_first: bool = False
    ) -> Iterator[Any]:
        """The batches from ``start`` on, while the state of the dataset after each one is kept.

        A dataset that was restored to that place goes on there; else what comes before is read, and
        left out. With ``keeps_first`` the first batch of the epoch is read once more, ahead.
        """
        if not hasattr(self.dataset, "state_dict"):
            yield from super()._read_from(position, start, keeps_first=keeps_first)
            return
        progress, is_iterable = self._progress, isinstance(self.dataset, IterableDataset)
        restored, progress.reader_state = progress.reader_state, None
        if restored is not None and restored["num_read"] != start:
            restored = None  # skip_first_batches begins elsewhere
        position.reader_states = states = {}
        begin = int(restored["begin"]) if restored else start
        # The methods of torchdata's class, which in the order of the bases comes after ours.
        torchdata: Any = super(ResumableLoader, self)
        index = self._index
        index.start, index.keeps_first = 0, False
        index.before_start = None
        if keeps_first:
            dataset: Any = self.dataset
            at_start, order = copy.deepcopy(dataset.state_dict()), self._generator_states()
            torchdata.load_state_dict({})
            yield next(torchdata.__iter__())
            dataset.load_state_dict(at_start)  # that read has moved it on
            for name, generator in self._generators().items():
                generator.set_state(order[name])  # so that the others come in the same order
        if start:
            index.before_start = position.replay.reach_start
        torchdata.load_state_dict(restored["state"] if restored else {})
        index.start = 0 if is_iterable else begin
        reader = torchdata.__iter__()
        position.shard_pass = getattr(index.sampler, "newest_pass", None)
        batches = index.skip(reader, 0 if restored else start) if is_iterable else reader
        # What a user's own class gives may be a plain generator: then batches are counted.
        if not hasattr(reader, "state_dict"):
            yield from batches
            return
        for number, batch in enumerate(batches, start + 1):
            states[number] = {
                "num_read": number,
                "begin": begin,  # where torchdata's iterator began: its state counts from there
                "state": reader.state_dict(),
            }
            states.pop(number - 2 * self._batches_a_step - 1, None)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        position = self._progress.position
        if self._progress.restored is not None:
            state["reader"] = self._progress.reader_state  # loaded, and not yet used
        elif position is not None and state["given"] == position.num_given > 0:
            num_read = position.num_given * self._batches_a_step
            state["reader"] = position.reader_states.get(num_read)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        reader = state_dict.get("reader") if self._reads_as_then(state_dict) else None
        self._progress.reader_state = reader


class StatefulShard(_KeepsReaderState, DataLoaderShard):
    """A loader that gives each rank its own batches, from a dataset that says how far it is."""


class StatefulDispatcher(_KeepsReaderState, DataLoaderDispatcher):
    """A loader that rank 0 reads, from a dataset that says how far it is."""

    @property
    def _batches_a_step(self) -> int:  # type: ignore[override]
        return self._batches_a_round
