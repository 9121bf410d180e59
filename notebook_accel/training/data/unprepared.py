"""Warns where all ranks train on the same batches, since a loader was not prepared.

Each rank writes a short digest of a loader's first batch into the ranks' store, and compares it
with another rank's later on: at the loader's next pass, or at the hundredth batch of one. So a
loader whose data is split in any other way is left alone, and no rank waits for another.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from notebook_accel.rank.this_rank import current
from notebook_accel.training.collectives import exchange
from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.collectives.nested import leaves
from notebook_accel.training.settings.notices import notice_once

_NUM_BATCHES = 100
# Of a tensor, at most about so many elements are compared.
_NUM_ELEMENTS = 1000


def watch_loaders(group: DataGroup, trains: Callable[[], bool]) -> None:
    """Watch the loaders of this process; called once a model was prepared for several ranks."""
    current().shared[_Watch] = _Watch(group, trains)
    read: Any = DataLoader.__iter__
    if hasattr(read, "__wrapped__"):
        return

    @functools.wraps(read)
    def watched(loader: DataLoader[Any]) -> Any:
        batches, watch = read(loader), current().shared.get(_Watch)
        here: Any = inspect.currentframe()
        caller = here.f_back
        is_ours = str(caller.f_globals.get("__name__")).startswith("notebook_accel.")
        if watch is None or is_ours:
            return batches
        return _Pass(batches, watch, _name_of(loader, caller))

    DataLoader.__iter__ = watched  # type: ignore[method-assign]


@dataclass
class _Watch:
    group: DataGroup
    trains: Callable[[], bool]
    digests: dict[str, str] = field(default_factory=dict)
    """Of first batches, by the loader's name: some code makes its loader anew for each epoch."""

    def look(self, name: str, batch: Any) -> None:
        if not (torch.is_grad_enabled() and self.trains()):
            return  # what is evaluated may be the same on all ranks
        key, size = f"first batch of {name} in call {current().call}, share ", self.group.size
        store = exchange().store()
        if name not in self.digests:
            self.digests[name] = _digest(batch)
            store.set(f"{key}{self.group.index}", self.digests[name])
        else:
            other = f"{key}{(self.group.index + 1) % size}"
            if store.check([other]) and store.get(other) == self.digests[name].encode():
                notice_once(
                    f"unprepared {name}",
                    f"{name} was not prepared: the ranks train on the same batches, {size} times "
                    f"each. Write {name} = accelerator.prepare({name})",
                )


class _Pass:
    """The iterator of a loader, which counts its batches."""

    def __init__(self, batches: Iterator[Any], watch: _Watch, name: str) -> None:
        self._batches = batches
        self._watch = watch
        self._name = name
        self._num_batches = 0

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._num_batches += 1
        # Not where an iterator is made: tqdm makes one that it never reads.
        if self._num_batches in (1, _NUM_BATCHES):
            with suppress(Exception):  # of the batch's classes, or of a store that has gone
                self._watch.look(self._name, batch)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _digest(batch: Any) -> str:
    text = []
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            some = leaf.detach().flatten()[:: max(1, leaf.numel() // _NUM_ELEMENTS)]
            text.append(f"{tuple(leaf.shape)} {some.tolist()}")
        else:
            text.append(repr(leaf))
    return str(zlib.crc32("".join(text).encode()))


def _name_of(loader: DataLoader[Any], frame: FrameType | None) -> str:
    """Return the name of a loader in the code that reads it; libraries between are left out."""
    while frame is not None:
        owner = getattr(frame.f_locals.get("self"), "__dict__", {})
        known = [("", frame.f_locals), ("self.", owner), ("", frame.f_globals)]
        for prefix, names in known if "-packages" not in frame.f_code.co_filename else ():
            for name, value in list(names.items()):
                if value is loader and name != "self":
                    return f"{prefix}{name}"
                # One for each phase: {"train": ..., "val": ...}. A large one is of something else,
                # and one of a class derived from dict may import all that it has.
                for key, one in list(value.items()) if type(value) is dict else ():
                    if one is loader and isinstance(key, (str, int)) and len(value) < 10:
                        return f"{prefix}{name}[{key!r}]"
        frame = frame.f_back
    return "loader"
