"""The pieces that a checkpoint is made of: each is collected first, and then written.

::

    collect      a piece's state, as it is now            in the loop, between two steps
    copy         so that later steps cannot change it     only for a save in the background
    prepare      what ranks agree on, by collectives      in the loop
    write        this rank's file, no collective          in the loop, or in the background
    complete     what rank 0 adds once all have written   in the loop, or in the background

A save that the training loop waits for collects and writes one piece after the other, so that
memory holds only one of them at a time beside the training's own state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notebook_accel.training.files.atomic import naming_full_disk
from notebook_accel.training.files.state_files import write_state


@dataclass
class Piece:
    """One file of a checkpoint, or this rank's part of a file or folder that all ranks write."""

    state: Any
    """What is written."""
    into: Callable[[Any, Path], None]
    """Writes a state into a folder."""

    def prepare(self, folder: Path) -> None:
        """Agree with the other ranks on what each of them writes; all ranks call it together."""

    def write(self, folder: Path) -> Any:
        """Write the piece; return what ``complete`` needs of it on rank 0, as values for JSON."""
        self.into(self.state, folder)

    def complete(self, results: Sequence[Any]) -> None:
        """Write the index of all ranks' parts, if this piece has one.

        Rank 0 calls it at the end.
        """


def state_file(state: Any, name: str, owner: str) -> Piece:
    """Return a piece that writes ``state`` to the file ``name``; errors name ``owner``."""
    return Piece(state, lambda state, folder: write_state(state, folder / name, owner))


def write_one_by_one(pieces: Iterable[Piece], folder: Path) -> tuple[list[Piece], list[Any]]:
    """Collect, prepare and write one piece after the other, and free the state of each.

    All ranks call it, since preparing a piece is a collective.
    """
    written, results = [], []
    for piece in pieces:
        piece.prepare(folder)
        with naming_full_disk(folder.parent):
            results.append(piece.write(folder))
        piece.state = None
        written.append(piece)
    return written, results


def write_prepared(pieces: Sequence[Piece], folder: Path) -> list[Any]:
    """Write pieces that are prepared already; return the value that ``write`` returned for each.

    No collective, so a thread may call it.
    """
    with naming_full_disk(folder.parent):
        return [piece.write(folder) for piece in pieces]


def complete(pieces: Sequence[Piece], results: Sequence[Sequence[Any]]) -> None:
    """Complete all pieces, on rank 0 after all ranks have written theirs."""
    for index, piece in enumerate(pieces):
        piece.complete([of_rank[index] for of_rank in results if index < len(of_rank)])
