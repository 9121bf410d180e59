"""Sharded states: every rank writes its parts, by torch.distributed.checkpoint (DCP).

There is a folder for each model and each optimizer::

    pytorch_model_fsdp_0/   .metadata, __0_0.distcp, __1_0.distcp, ...   tensors by name
                            extra.bin                                    what is no tensor
    optimizer_0/            .metadata, __0_0.distcp, ...                 "state.<weight>.<entry>"
                            groups.bin                                   what is no tensor

Tensors are found by the names of the weights. So the ranks that read may differ in number and
device mesh from those that wrote; a single process can read them, too. DCP would pickle values
that are no tensors (learning rates, say). So these are kept in a file of their own beside the
tensors, which is read without trusting it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.errors import NotebookAccelError
from notebook_accel.private import of_torch
from notebook_accel.rank.this_rank import has_process_group
from notebook_accel.training.collectives import gather_object, this_rank
from notebook_accel.training.files import Format, Piece, state_file
from notebook_accel.training.files.state_files import explain, on_host, read_pickle, read_state

_EXTRA_FILE = "extra.bin"
_EXTRA_STATE = "_extra_state"  # how torch ends the names of what get_extra_state gave
_INDEX = ".metadata"
# Classes in an index that are no plain dataclasses; making one only stores what it is given.
_INDEX_NAMES = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (metadata.MetadataIndex, metadata.TensorProperties)
}


class ShardedPiece(Piece):
    """This rank's parts of the tensors in one folder, with a plain file beside them on rank 0.

    DCP's own ``save`` mixes collectives and writing. Here, ``prepare`` does all collectives first,
    and ``write`` needs no other rank, so that it can run in the background.

    Args:
        beside: the piece that writes the values that are no tensors; None on other ranks than 0.
    """

    def __init__(self, state: dict[str, Any], name: str, beside: Piece | None = None) -> None:
        super().__init__(state)
        self._name = name
        self._beside = beside

    def prepare(self, folder: Path) -> None:
        self._path = path = folder / self._name
        self._writer = FileSystemWriter(path)
        self._planner = DefaultSavePlanner(flatten_state_dict=False)
        is_lead = this_rank() == 0
        self._planner.set_up_planner(self.state, is_coordinator=is_lead)
        self._writer.set_up_storage_writer(is_lead)
        own = self._writer.prepare_local_plan(self._planner.create_local_plan())
        # Each rank makes the plan of all, from the same plans of each, rather than wait for rank 0.
        plans, self._metadata = self._planner.create_global_plan(gather_object([own]))
        self._plan = self._planner.finish_plan(self._writer.prepare_global_plan(plans)[this_rank()])

    def write(self, folder: Path) -> Any:
        if self._beside is not None:
            self._beside.write(self._path)
        written = self._writer.write_data(self._plan, self._planner).wait()
        # As plain values: they go to rank 0 by a store that other users can write to.
        return [(vars(one.index), one.size_in_bytes, vars(one.storage_data)) for one in written]

    def complete(self, results: Sequence[Any]) -> None:
        found = [
            [
                WriteResult(metadata.MetadataIndex(**index), size, of_torch.part_of_file(stored))
                for index, size, stored in of_rank
            ]
            for of_rank in results
        ]
        self._writer.finish(self._metadata, found)


class Sharded(Format):
    """A folder for each model and optimizer, in which every rank has its parts."""

    def model_pieces(self, state: dict[str, Any], index: int) -> Iterator[Piece]:
        tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
        others = {
            name: copy.deepcopy(value) for name, value in state.items() if name not in tensors
        }
        # A stage of a pipeline has other modules than the next; of what several ranks have, the
        # lowest rank's counts.
        everywhere: dict[str, Any] = {}
        for of_rank in reversed(gather_object([others])):
            everywhere |= of_rank
        has_beside = everywhere and this_rank() == 0
        beside = state_file(everywhere, _EXTRA_FILE, "the model") if has_beside else None
        yield ShardedPiece(tensors, f"pytorch_model_fsdp_{index}", beside)

    def optimizer_pieces(self, optimizer: Optimizer, index: int) -> Iterator[Piece]:
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, Any] = {}
        for weight, name in _named(optimizer, self.names):
            for entry, value in optimizer.state.get(weight, {}).items():
                kept: dict[str, Any] = tensors if torch.is_tensor(value) else plain
                kept[f"state.{name}.{entry}"] = value
        # A stage of a pipeline has other weights than the next.
        everywhere = dict(item for each in gather_object([plain]) for item in each.items())
        settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.state_dict()["param_groups"]
        ]
        of_all = {"groups": copy.deepcopy(settings), "plain": everywhere}
        beside = state_file(of_all, "groups.bin", "the optimizer")
        yield ShardedPiece(tensors, f"optimizer_{index}", beside if this_rank() == 0 else None)

    def read_model(self, model: Module, folder: Path, index: int) -> None:
        """Read a model's weights from a sharded checkpoint, in place; all ranks call it.

        Each rank reads only the parts of the weights that it has.

        Raises:
            RuntimeError: ``strict`` is set, and the checkpoint lacks a weight of the model.
        """
        path = folder / f"pytorch_model_fsdp_{index}"
        known = tensors_in(path)
        state = {
            name: value for name, value in model.state_dict().items() if torch.is_tensor(value)
        }
        # Accelerate writes each name below "model".
        prefix = "" if state.keys() & known.keys() else "model."
        missing = sorted(name for name in state if prefix + name not in known)
        if self.strict and missing:
            raise RuntimeError(
                f"{path} lacks weights of {type(model).__name__}: {', '.join(missing)}. Load it "
                "into the model that it was saved from, or with load_state(strict=False), which "
                "leaves these as they are"
            )
        # The tensors of a state dict are the model's own: DCP fills them where they are.
        found = {name: value for name, value in state.items() if prefix + name in known}
        read_parts({prefix + name: value for name, value in found.items()}, path)
        extra = {name: value for name, value in found.items() if name.endswith(_EXTRA_STATE)}
        if (path / _EXTRA_FILE).exists():
            extra |= read_state(path / _EXTRA_FILE, on_host(self.options))
        own = [name for name in model.state_dict() if name in extra]
        if own:
            model.load_state_dict({name: extra[name] for name in own}, strict=False)

    def read_optimizer(self, optimizer: Optimizer, folder: Path, index: int) -> None:
        """Read an optimizer's state from a sharded checkpoint; all ranks call it.

        Each rank reads only the entries of the weights, or parts of weights, that it has.
        """
        path = folder / f"optimizer_{index}"
        beside = read_state(path / "groups.bin", on_host(self.options))
        stored, own_groups = len(beside["groups"]), len(optimizer.param_groups)
        if stored != own_groups:
            raise ValueError(
                f"{path} holds an optimizer of {stored} groups of weights, and the "
                f"{type(optimizer).__name__} here has {own_groups}: load it into one made alike"
            )
        known = tensors_in(path)
        entries: dict[str, list[str]] = {}
        for key in (*known, *beside["plain"]):
            name, _, entry = key.removeprefix("state.").rpartition(".")
            entries.setdefault(name, []).append(entry)
        tensors: dict[str, torch.Tensor] = {}
        state: dict[torch.Tensor, dict[str, Any]] = {}
        counted_on_device = {
            weight
            for group in optimizer.param_groups
            if group.get("fused") or group.get("capturable")
            for weight in group["params"]
        }
        for weight, name in _named(optimizer, self.names):
            own = state[weight] = {}
            for entry in entries.get(name, []):
                key = f"state.{name}.{entry}"
                if key in known:
                    tensors[key] = own[entry] = _room_for(
                        known[key], weight, on_device=weight in counted_on_device
                    )
                else:
                    own[entry] = beside["plain"][key]
        read_parts(tensors, path)
        optimizer.state.clear()
        optimizer.state.update({weight: own for weight, own in state.items() if own})
        for group, settings in zip(optimizer.param_groups, beside["groups"], strict=True):
            # How steps are computed here depends on this mesh, not on that of the checkpoint.
            group.update(
                {key: value for key, value in settings.items() if key not in _STEP_SETTINGS}
            )

    def shapes(self, folder: Path, index: int) -> dict[str, tuple[int, ...]]:
        path = folder / f"pytorch_model_fsdp_{index}"
        # A save hook that writes the model itself leaves none.
        known = tensors_in(path) if path.is_dir() else {}
        return {name: tuple(one.size) for name, one in known.items()}

    def check(self, folder: Path) -> None:
        for path in sorted(folder.glob(f"*/{_INDEX}")):
            read_index(path.parent)


_STEP_SETTINGS = {"foreach", "fused", "capturable"}


def _named(
    optimizer: Optimizer, names: Mapping[torch.Tensor, str]
) -> Iterator[tuple[torch.Tensor, str]]:
    for number, group in enumerate(optimizer.param_groups):
        for position, weight in enumerate(group["params"]):
            # A weight of no prepared model has its position for a name.
            yield weight, names.get(weight, f"group{number}.{position}")


def _room_for(
    stored: metadata.TensorStorageMetadata, weight: torch.Tensor, *, on_device: bool
) -> torch.Tensor:
    """Return a tensor to read an entry of ``weight``'s optimizer state into.

    If the entry has the weight's shape, the tensor is sharded like the weight. Other entries, such
    as counts of steps, are on the host, where most optimizers keep them. With ``on_device`` they
    are on the weight's device, because fused optimizers count there.
    """
    dtype = stored.properties.dtype
    if stored.size == weight.shape:
        return torch.zeros_like(weight.detach(), dtype=dtype)
    return torch.zeros(stored.size, dtype=dtype, device=weight.device if on_device else "cpu")


class _CarefulReader(FileSystemReader):
    """A reader of sharded checkpoints for DCP that does not trust the index file.

    Torch's own reader unpickles the index, which can run any code.
    """

    def read_metadata(self) -> metadata.Metadata:
        index = read_index(Path(self.path))
        # As torch's own does.
        index.storage_meta = index.storage_meta or metadata.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


def read_index(folder: Path) -> metadata.Metadata:
    """Return the index of a folder of sharded tensors, read without trusting the file.

    Raises:
        FileNotFoundError: there is no index.
        NotebookAccelError: the index is broken, names a type that is not known to be safe, or
            points to files outside of its folder.
    """
    path = folder / _INDEX
    index = read_pickle(path, _INDEX_NAMES)
    if not isinstance(index, metadata.Metadata):
        raise NotebookAccelError(f"{path} holds a {type(index).__name__}, and no index of parts")
    for name in sorted({part.relative_path for part in (index.storage_data or {}).values()}):
        if Path(name).name != name:
            raise NotebookAccelError(
                f"{path} names the file {name!r}, which does not lie beside it: load a checkpoint "
                "that you trust"
            )
    return index


def tensors_in(path: Path) -> dict[str, metadata.TensorStorageMetadata]:
    """Return what the index of a folder says of each tensor; raises as :func:`read_index`."""
    stored = read_index(path).state_dict_metadata
    return {
        key: one for key, one in stored.items() if isinstance(one, metadata.TensorStorageMetadata)
    }


def read_parts(state: dict[str, Any], path: Path, *, alone: bool = False) -> None:
    """Fill the tensors of ``state`` in place from the sharded tensors in the folder ``path``.

    Args:
        alone: True: this process reads by itself. False: all ranks call it together.

    Raises:
        NotebookAccelError: a file is damaged.
    """
    no_dist = alone or not has_process_group()
    try:
        with warnings.catch_warnings():
            # That a single process reads on its own, as it is meant to.
            warnings.simplefilter("ignore", UserWarning)
            load(state, storage_reader=_CarefulReader(path), no_dist=no_dist)
    except CheckpointException as failed:  # no Exception, but a BaseException
        error, _ = next(iter(failed.failures.values()))
        if isinstance(error, ValueError):
            raise ValueError(f"{path}: {error}") from failed
        if isinstance(error, (PermissionError, MemoryError)) or not isinstance(error, Exception):
            raise error from failed
        raise NotebookAccelError(explain(path, error)) from failed
