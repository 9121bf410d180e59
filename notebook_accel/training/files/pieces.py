"""What a checkpoint is made of: pieces that are collected first, and written then.

::

    collect      a piece's state, as it is now            in the loop, between two steps
    copy         later steps cannot change it             only where training goes on meanwhile
    prepare      what ranks agree on, by collectives      in the loop
    write        this rank's file, no collective          in the loop, or in the background
    complete     what rank 0 adds once all have written   wherever it is written

A save that training waits for collects and writes one piece after the other, so that no more than
one is in memory beside the training's own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accel.training.files.atomic import naming_full_disk
from notebook_accel.training.files.state_files import write_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

__all__ = ["Piece", "complete", "state_file", "write_one_by_one", "write_prepared"]


@dataclass
class Piece:
    """One file of a checkpoint, or this rank's part of several."""

    state: Any
    """What is written."""
    into: Callable[[Any, Path], None]
    """Writes a state into a folder."""

    def with_state(self, state: Any) -> Piece:
        """The same piece of another state."""
        new = copy.copy(self)
        new.state = state
        return new

    def prepare(self, folder: Path) -> None:
        """Agree with the other ranks on what each writes; all of them call it."""

    def write(self, folder: Path) -> Any:
        """Write the piece; returns what rank 0 needs to complete it, in types of JSON."""
        self.into(self.state, folder)

    def complete(self, results: Sequence[Any]) -> None:
        """Write the index of the parts of all ranks; rank 0 calls it.

        Args:
            results: what ``write`` gave on each rank, in order of the ranks.
        """


def state_file(state: Any, name: str, owner: str) -> Piece:
    """Return a piece that writes ``state`` to the file ``name``; errors name ``owner``."""
    return Piece(state, lambda state, folder: write_state(state, folder / name, owner))


def write_one_by_one(pieces: Iterable[Piece], folder: Path) -> tuple[list[Piece], list[Any]]:
    """Collect, prepare and write one piece after the other, and let go of each.

    Returns:
        the pieces, without their states, and what rank 0 has to know of each.
    """
    written, results = [], []
    for piece in pieces:
        piece.prepare(folder)
        with naming_full_disk(folder.parent):
            results.append(piece.write(folder))
        written.append(piece.with_state(None))
    return written, results


def write_prepared(pieces: Sequence[Piece], folder: Path) -> list[Any]:
    """Write prepared pieces; returns what ``write`` returned for each."""
    with naming_full_disk(folder.parent):
        return [piece.write(folder) for piece in pieces]


def complete(pieces: Sequence[Piece], results: Sequence[Sequence[Any]]) -> None:
    """Complete all pieces; ``results`` are those of each rank, in order of the ranks."""
    for index, piece in enumerate(pieces):
        piece.complete([of_rank[index] for of_rank in results if index < len(of_rank)])
