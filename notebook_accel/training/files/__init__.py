"""Files of weights, and ``Format``: how a checkpoint keeps its models and optimizers.

The base keeps them whole, a file for each, and tied weights once. Exports of large models
(:func:`save_model`) are divided into several files.

::

    model.safetensors, model_1.safetensors, ...   tied weights once; pytorch_model.bin by wish
    optimizer.bin, optimizer_1.bin, ...

A new format is a file with its class, and a line in the table of ``checkpoint/start``, by which a
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

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.rank.this_rank import current
from notebook_accel.training.files.atomic import StagedFolder, naming_full_disk, replacing_file
from notebook_accel.training.files.state_files import explain, on_host, read_state, write_state
from notebook_accel.training.processes import topology

FSDP_MODEL_NAME = "pytorch_model_fsdp"
OPTIMIZER_NAME = "optimizer"
SCALER_NAME = "scaler.pt"

# What ``save_model`` writes; a suffix such as "-00001-of-00002" counts the files of a large model.
WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"


# What save_model writes of its one model. Checkpoints number their models instead.
_MODEL_FILE = re.compile(r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def numbered(stem: str, index: int, suffix: str) -> str:
    """Return the file name of object ``index``, from 0: ``model.bin``, ``model_1.bin``, ..."""
    return f"{stem}{f'_{index}' if index else ''}{suffix}"


def write_safetensors(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors to a safetensors file, each once.

    Of a tensor with several names (tied weights), the other names go into the file's header.
    """
    tensors, ties = _untie(state)
    save_file(tensors, path, metadata={"format": "pt", **ties})


def with_ties(state: dict[str, Any], model: Module) -> dict[str, Any]:
    """Return ``state`` with the missing names of tied weights added.

    Files have only one name of a weight that ``model`` has under several names.
    """
    several: dict[Any, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if torch.is_tensor(value):
            # In parts, or empty as DeepSpeed's stage 3 leaves it, it has no memory to tell it by.
            has_memory = type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel()
            key = memory_of(value) if has_memory else id(value)
            several.setdefault(key, []).append(name)
    filled = dict(state)
    for names in several.values():
        kept = next((name for name in names if name in state), None)
        if kept is not None:
            filled.update({name: state[kept] for name in names if name not in state})
    return filled


def save_object(obj: Any, target: Any, *, safe: bool) -> None:
    """Write an object to a path or an open file; at a path, the file is complete or not there."""
    current().settle_device()
    if not isinstance(target, (str, os.PathLike)):
        torch.save(obj, target)
        return
    with replacing_file(target) as path:
        if safe:
            write_safetensors(obj, path)
        else:
            torch.save(obj, path)


def save_model(
    state: Mapping[str, Any], folder: Path, max_shard_size: float | str, *, safe: bool
) -> None:
    """Write a model's weights into a folder; model weights that it has already are replaced.

    Args:
        max_shard_size: largest size of a file: bytes, or a text such as "10GB".
    """
    limit = max_shard_size
    if not isinstance(limit, (int, float)):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B)", str(limit).strip().upper())
        if found is None or found[2] not in _UNITS:
            raise ConfigError(f'max_shard_size={limit!r}: expected bytes, or a text such as "10GB"')
        limit = int(float(found[1]) * _UNITS[found[2]])
    final = folder.expanduser().resolve()
    staged = StagedFolder.of(final)
    try:
        with naming_full_disk(final.parent):
            _save_sharded(state, staged.path, limit=limit, safe=safe)
        staged.publish(is_ours=lambda name: bool(_MODEL_FILE.fullmatch(name)))
    finally:
        staged.discard()


def _save_sharded(state: Mapping[str, Any], folder: Path, *, limit: float, safe: bool) -> None:
    """Write weights as one file, or as several of at most ``limit`` bytes with an index file."""
    others = {name: value for name, value in state.items() if not torch.is_tensor(value)}
    safe = safe and not others
    stem, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    tensors, ties = _untie({name: state[name] for name in state if name not in others})
    shards = list(_shards(tensors, limit))
    if not safe:  # a torch file has all names of a tied weight, and the weight once
        for shard in shards:
            shard.update({name: shard[kept] for name, kept in ties.items() if kept in shard})
    shards[0].update(others)
    names = [f"{stem}{suffix}"]
    if len(shards) > 1:
        width = len(shards)
        names = [f"{stem}-{n:05d}-of-{width:05d}{suffix}" for n in range(1, width + 1)]
        where = {key: name for shard, name in zip(shards, names, strict=True) for key in shard}
        values = {
            id(value): value for shard in shards for value in shard.values()
        }  # tied ones once
        size = sum(value.nbytes for value in values.values() if torch.is_tensor(value))
        index = {"metadata": {"total_size": size}, "weight_map": where}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{stem}{suffix}.index.json").write_text(text)
    for shard, name in zip(shards, names, strict=True):
        if safe:
            own = {name: kept for name, kept in ties.items() if kept in shard}
            save_file(shard, folder / name, metadata={"format": "pt", **own})
        else:
            torch.save(shard, folder / name)


def _shards(tensors: Mapping[str, torch.Tensor], limit: float) -> Iterator[dict[str, Any]]:
    # huggingface_hub has a splitter, too, and brings a client for its Hub along: too much to ask of
    # every installation for a rule of ten lines.
    shard: dict[str, Any] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tied tensors: of the same memory, shape, strides and type."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _untie(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors with memory of their own, and the other names of tied ones."""
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    seen: dict[Any, str] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        whole = memory_of(tensor)
        if tensor.numel() and whole in seen:
            ties[name] = seen[whole]
            continue
        seen[whole] = name
        storage = tensor.untyped_storage().data_ptr()
        shares = storage in storages and tensor.numel() > 0
        storages.add(storage)
        own = torch.contiguous_format  # safetensors refuses a transposed view, and its clone
        tensors[name] = tensor.clone(memory_format=own) if shares else tensor.contiguous()
    return tensors, ties


def save(
    obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object to a file, by default on rank 0 alone; on other ranks this does nothing.

    A file at a path is complete or not there.

    Args:
        obj: the object, such as a state dict.
        f: path or open file.
        save_on_each_node: the first rank of each machine writes, rather than rank 0 alone.
        safe_serialization: write a mapping of tensors as safetensors; without effect on an open
            file.

    Example:
        >>> import os, tempfile, torch
        >>> from notebook_accel.utils import save
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> save({"weight": torch.ones(2)}, path, safe_serialization=True)
    """
    here = topology.topology()
    index = here.local_process_index if save_on_each_node else here.process_index
    if index == 0:
        save_object(obj, f, safe=safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Read a file of ``torch.save`` without trusting it.

    Args:
        f: path or open file.
        map_location: device of the tensors, as in ``torch.load``. None: the device that they were
            on when saved.
        **kwargs: further arguments of ``torch.load``; ``weights_only=False`` trusts the file, which
            may then run any code.

    Raises:
        NotebookAccelError: the file is empty or broken, or names a type that is not known to be
            safe. For an open file, torch's own errors are raised instead.

    Example:
        >>> import os, tempfile, torch
        >>> from notebook_accel.utils import load, save
        >>> path = os.path.join(tempfile.mkdtemp(), "state.pt")
        >>> save({"step": 3}, path)
        >>> load(path)
        {'step': 3}
    """
    options = {"map_location": map_location, **kwargs}
    if isinstance(f, (str, os.PathLike)):
        return read_state(Path(f), options)
    return torch.load(f, **options)


@dataclass
class Piece:
    """One file of a checkpoint, or this rank's part of a file or folder that all ranks write."""

    state: Any = None
    """What is written."""
    into: Callable[[Any, Path], None] = lambda _, __: None
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
    stem: str = "pytorch_model"
    """How the names of files of whole weights begin that are no safetensors files."""
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
            write = partial(save_weights, index=index, safe=self.safe, stem=self.stem)
            yield Piece(state, write)

    def optimizer_pieces(self, optimizer: Optimizer, index: int) -> Iterator[Piece]:
        # Every rank takes part in joining what is in parts; one at a time for the memory.
        state = self.whole_state(optimizer)
        if self.writes:
            yield state_file(state, numbered("optimizer", index, ".bin"), type(optimizer).__name__)

    def read_model(self, model: Module, folder: Path, index: int) -> dict[str, Any] | None:
        """Return the whole weights of model ``index``; None if the model has got its parts."""
        paths = [
            folder / numbered("model", index, ".safetensors"),
            folder / numbered(self.stem, index, ".bin"),
        ]
        if not self.safe:
            paths.reverse()
        paths.append(folder / numbered("pytorch_model", index, ".bin"))  # as save_state() names it
        path = required(next((path for path in paths if path.exists()), paths[0]))
        state: dict[str, Any]
        if path.suffix == ".bin":
            state = read_state(path, on_host(self.options))
            return state
        try:
            state = load_file(path)
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
        except SafetensorError as error:
            raise NotebookAccelError(explain(path, error)) from error
        header.pop("format", None)  # "pt", by which libraries know the file: no weight's other name
        return {**{name: state[kept] for name, kept in header.items() if kept in state}, **state}

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


def save_weights(
    state: Mapping[str, Any], folder: Path, index: int, *, safe: bool, stem: str = "pytorch_model"
) -> None:
    """Write the weights of model ``index`` (from 0) of a checkpoint to one file in ``folder``.

    With ``safe`` it is a safetensors file, unless ``state`` has values that are not tensors: such a
    file cannot hold these, so a torch file is written.
    """
    if safe and all(isinstance(value, torch.Tensor) for value in state.values()):
        write_safetensors(state, folder / numbered("model", index, ".safetensors"))
    else:
        write_state(dict(state), folder / numbered(stem, index, ".bin"), "the model")


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
