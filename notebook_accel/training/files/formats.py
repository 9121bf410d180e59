"""``Format``: how a checkpoint keeps its models and optimizers. The base: whole, a file for each.

::

    model.safetensors, model_1.safetensors, ...   tied weights once; pytorch_model.bin by wish
    optimizer.bin, optimizer_1.bin, ...

A new format is a file with its class, and a line in the table of ``checkpoint/folders``, by which a
checkpoint is read. A strategy names the format that it writes (``Strategy.format``).

A format gives *pieces*: each is collected first, and then written::

    collect      a piece's state, as it is now            in the loop, between two steps
    copy         so that later steps cannot change it     only for a save in the background
    prepare      what ranks agree on, by collectives      in the loop
    write        this rank's file, no collective          in the loop, or in the background
    complete     what rank 0 adds once all have written   in the loop, or in the background

A save that the training loop waits for collects and writes one piece after the other, so that
memory holds only one of them at a time beside the training's own state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.errors import NotebookAccelError
from notebook_accel.training.files.atomic import naming_full_disk
from notebook_accel.training.files.state_files import explain, on_host, read_state, write_state
from notebook_accel.training.files.weights import numbered, write_safetensors


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


@dataclass(kw_only=True)
class Format:
    """Writes and reads the models and optimizers of a checkpoint; all ranks call its methods."""

    names: Mapping[torch.Tensor, str] = field(default_factory=dict)
    """The names of the models' weights, see :func:`names_of`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the user's: for ``torch.load``, or for a library that writes by itself."""
    strict: bool = True
    """Whether each weight of a model must be in the checkpoint."""
    writes: bool = True
    """Whether this rank writes what is whole."""
    safe: bool = True
    """Whether whole weights go into safetensors files."""
    whole_state: Callable[[Optimizer], dict[str, Any]] = Optimizer.state_dict
    """Joins the state dict of an optimizer; all ranks call it."""

    def pieces(
        self, weights: Sequence[dict[str, Any]], optimizers: Sequence[Optimizer]
    ) -> Iterator[Piece]:
        """Yield what this rank writes; ``weights`` has the state dict (or part) of each model."""
        for index, state in enumerate(weights):
            yield from self.model_pieces(state, index)
        for index, optimizer in enumerate(optimizers):
            yield from self.optimizer_pieces(optimizer, index)

    def model_pieces(self, state: dict[str, Any], index: int) -> Iterator[Piece]:
        if self.writes:
            yield Piece(state, partial(save_weights, index=index, safe=self.safe))

    def optimizer_pieces(self, optimizer: Optimizer, index: int) -> Iterator[Piece]:
        # Every rank takes part in joining what is in parts; one at a time for the memory.
        state = self.whole_state(optimizer)
        if self.writes:
            yield state_file(state, numbered("optimizer", index, ".bin"), type(optimizer).__name__)

    def read_model(self, model: Module, folder: Path, index: int) -> dict[str, Any] | None:
        """Return the whole weights of model ``index``; None if the model has got its parts."""
        safe = folder / numbered("model", index, ".safetensors")
        plain = folder / numbered("pytorch_model", index, ".bin")
        if safe.exists() or not plain.exists():
            return _read_safetensors(required(safe))
        state: dict[str, Any] = read_state(plain, on_host(self.options))
        return state

    def read_optimizer(
        self, optimizer: Optimizer, folder: Path, index: int
    ) -> dict[str, Any] | None:
        """Return the whole state of optimizer ``index``; None if nothing is left to load."""
        path = required(folder / numbered("optimizer", index, ".bin"))
        state: dict[str, Any] = read_state(path, self.options)
        return state

    def shapes(self, folder: Path, index: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a model's weights by name, as far as headers say them."""
        path = folder / numbered("model", index, ".safetensors")
        # If it is not there, or broken, reading it says so.
        with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in [*file.keys()]}
        return {}

    def check(self, folder: Path) -> None:
        """Raise if a checkpoint's list of its parts is damaged, or not to be trusted."""


def save_weights(state: Mapping[str, Any], folder: Path, index: int, *, safe: bool) -> None:
    """Write the weights of model ``index`` (from 0) of a checkpoint to one file in ``folder``.

    With ``safe`` it is a safetensors file, unless ``state`` has values that are not tensors: such a
    file cannot hold these, so a torch file is written.
    """
    if safe and all(isinstance(value, torch.Tensor) for value in state.values()):
        write_safetensors(state, folder / numbered("model", index, ".safetensors"))
    else:
        write_state(dict(state), folder / numbered("pytorch_model", index, ".bin"), "the model")


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = load_file(path)
        with safe_open(path, framework="pt") as opened:
            header = opened.metadata() or {}
    except SafetensorError as error:
        raise NotebookAccelError(explain(path, error)) from error
    header.pop("format", None)  # "pt", by which libraries know the file, and no weight's other name
    ties = {name: state[kept] for name, kept in header.items() if kept in state}
    return {**ties, **state}


def names_of(models: Sequence[Module]) -> dict[torch.Tensor, str]:
    """Return the weights' names, the same on every rank; the second model's begin with "1."."""
    return {
        weight: f"{index}.{name}" if index else name
        for index, model in enumerate(models)
        for name, weight in model.named_parameters()
    }


def entries(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; an empty list if there is no such folder."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def describe_folder(folder: Path) -> str:
    """Return a text that names a folder and its entries, for error messages."""
    if not folder.is_dir():
        return f"{folder}, which is {'a file' if folder.exists() else 'not there'}"
    return f"{folder}; it holds: {', '.join(entries(folder)) or 'nothing'}"


def required(path: Path) -> Path:
    """Return the path of a checkpoint's file; raise ``FileNotFoundError`` if it is not there."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path.name} is not in {describe_folder(path.parent)}. Give prepare() the objects "
            "that it was given when the checkpoint was saved"
        )
    return path
