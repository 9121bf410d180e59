"""Training state of a stopped or interrupted run: from the ranks to the notebook.

    each rank:  Preparation.parts_to_rescue -> RankPart, pickled, sent with the rank's last message
    notebook:   RankPart.join(parts of the other ranks) -> Rescued, which is ``run.rescued``
                Rescued.write -> file in the run's folder -> Rescued.read, also in another kernel

Ranks use no collectives for this: a rank that was interrupted in other code would never join one.
If weights are sharded, each rank sends its pieces with their offsets in the full tensors, and the
notebook puts them together. A sharded model cannot be sent as it is, so a copy on torch's meta
device is made before sharding::

    each rank:  prepare --> copy_on_meta(model), then the model is sharded in place
    notebook:   fill(meta_copy, joined weights) --> the model, unsharded
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch.nn import Module, Parameter

from notebook_accel.training.collectives.nested import honor_type, recursively_apply
from notebook_accel.training.files import numbered, save_weights
from notebook_accel.training.files.atomic import StagedFolder
from notebook_accel.training.files.state_files import write_state

# In the random states of a run that was interrupted elsewhere than at a common point of all ranks:
# within which step, if some weights may have made it.
INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class Rescued:
    """Training state of a stopped or interrupted run, as ``run.rescued`` gives it in the notebook.

    It has the objects that the newest ``Accelerator`` of the launched function had prepared. After
    Stop (``run.stop()``), all ranks ended at the same step. After an interrupt they did so where
    collectives are asynchronous, as on GPUs; on CPUs, the state is that of the moment of the
    interrupt, possibly in the middle of a step. Models and state dicts are full, even if weights
    were sharded over the ranks.
    """

    models: list[Module | None] = field(default_factory=list)
    """The models in the order in which they were prepared, unwrapped and on the CPU, also where
    they were spread over ranks. None for one that cannot be pickled, that was spread before
    ``prepare``, or of which weights are missing: make it anew and load its ``weights``."""

    weights: list[dict[str, Any] | None] = field(default_factory=list)
    """The whole state dict of each model, on the CPU; None where a piece of it is missing."""

    optimizers: list[dict[str, Any] | None] = field(default_factory=list)
    """The state dict of each optimizer, whole as well."""

    schedulers: list[dict[str, Any]] = field(default_factory=list)
    """The state dict of each scheduler."""

    step: int
    """Steps that rank 0's optimizers had made in the call."""

    missing: list[str] = field(default_factory=list)
    """A line for each thing that could not be rescued, or not as it should be."""

    files: dict[str, Any] = field(default_factory=dict)
    """The rest of a checkpoint by the names of its files: schedulers, places of loaders, ..."""

    def write_checkpoint(self, folder: Path) -> None:
        """Write the state as a checkpoint, which is complete or not there.

        Raises:
            ValueError: a state is missing.
            ConfigError, OSError: a state cannot be saved.
        """
        if None in [*self.weights, *self.optimizers]:
            raise ValueError("; ".join(self.missing))
        staged = StagedFolder.of(folder)
        try:
            for index, weights in enumerate(self.weights):
                save_weights(weights or {}, staged.path, index, safe=True)
            optimizers = enumerate(self.optimizers)
            named = {numbered("optimizer", index, ".bin"): state for index, state in optimizers}
            for name, state in {**named, **self.files}.items():
                write_state(state, staged.path / name, name)
            staged.publish(is_ours=lambda _: True)
        finally:
            staged.discard()

    def write(self, file: IO[bytes]) -> None:
        """Write all fields but ``models`` to a file that ``torch.load(weights_only=True)`` reads.

        Raises:
            Exception: a state dict cannot be pickled, or the file cannot be written.
        """
        state = {name: value for name, value in vars(self).items() if name != "models"}
        torch.save(state, file)
        file.seek(0)
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        if refused:
            raise TypeError(f"a state dict holds {', '.join(sorted(refused))}")

    @classmethod
    def read(cls, file: IO[bytes]) -> Rescued:
        """Return the state from a file of :meth:`write`; all its ``models`` are None.

        Raises:
            Exception: :meth:`write` did not write the file, or the file is damaged; ``torch.load``
                raises errors of many classes.
        """
        kept = torch.load(file, map_location="cpu", weights_only=True)
        kept["missing"].append(
            "models: the file has state dicts alone; make each model anew and load its weights"
        )
        return cls(models=[None for _ in kept["weights"]], **kept)

    def __repr__(self) -> str:
        # The state dicts of a small model alone are hundreds of lines.
        models = ", ".join(type(model).__name__ for model in self.models)
        parts = [
            f"step {self.step}",
            f"models=[{models}] with their weights",
            f"optimizers: {len(self.optimizers)}",
            f"schedulers: {len(self.schedulers)}",
            *(f"missing: {line}" for line in self.missing),
        ]
        return f"<Rescued: {', '.join(parts)}>"


@dataclass(frozen=True)
class TensorPiece:
    """One rank's piece of a sharded tensor.

    Attributes:
        offset: index of the piece's first element in the full tensor, one number per dimension.
        shape: shape of the full tensor.
    """

    values: torch.Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankPart(Rescued):
    """One rank's part of the training state of a stopped run, which the rank sends pickled.

    Rank 0 sends a model in one of two ways: with its weights inside, or as a copy without weights
    (``meta_copy``; None if there is no copy) and this rank's state dict beside it.

    Attributes:
        models: each prepared model, or its copy. All are None on ranks other than 0, and if state
            dicts are sent alone.
        weights: this rank's state dict of each prepared model, with a :class:`TensorPiece` for each
            sharded tensor. None if the notebook could not join the model's weights, or if rank 0
            sends them in full, inside the model or in its own ``weights``.
        optimizers: this rank's state dict of each optimizer, with a :class:`TensorPiece` for each
            sharded tensor; None for an optimizer whose states the notebook could not join.
        missing: why the optimizers' states are None, if the host has no memory for them.
        at_common_point: whether all ranks have left their loops at the same point.
        is_stepping: whether the rank was interrupted within an optimizer's step.
    """

    at_common_point: bool = True
    is_stepping: bool = False

    def join(self, others: Sequence[RankPart]) -> Rescued:
        """Return the full training state, joined from the parts of all ranks, in the notebook.

        Call it on the part of rank 0. The result's ``missing`` names objects that cannot be joined,
        and tells if the parts may not be of one step.
        """
        parts = [self, *others]
        missing: list[str] = []
        files = {name: state for part in reversed(parts) for name, state in part.files.items()}
        if not self.at_common_point:
            with_weights = [self, *(part for part in others if part.weights)]
            steps = {part.step for part in with_weights}
            torn = ""
            if len(steps) > 1 or any(part.is_stepping for part in with_weights):
                step = min(steps) + 1
                torn = f" within step {step}, which some weights may have made and others not"
                missing.append(f"weights: the interrupt came{torn}")
            for name, state in files.items():
                if name.startswith("random"):
                    state[INTERRUPTED] = torn
        # A rank that was interrupted while it prepared has fewer of them.
        made = []
        for index, model in enumerate(self.models):
            own = [part.weights[index] for part in parts if index < len(part.weights)]
            made.append(_whole_model(model, own, f"model {index}", missing))
        dropped = [line for part in parts for line in part.missing][:1]
        missing += dropped
        optimizers: list[Any] = [None for _ in self.optimizers]
        for index in () if dropped else range(len(optimizers)):
            states = [part.optimizers[index] for part in parts if index < len(part.optimizers)]
            optimizers[index] = _whole(states, f"optimizer {index}", missing)
        return Rescued(
            models=[model for model, _ in made],
            weights=[weights for _, weights in made],
            optimizers=optimizers,
            schedulers=self.schedulers,
            step=self.step,
            missing=missing,
            files=files,
        )


def in_pieces(values: Any) -> Any:
    """Return nested ``values`` with a :class:`TensorPiece` in place of each ``DTensor``."""
    from torch.distributed.tensor import DTensor

    def piece(spread: Any) -> TensorPiece:
        # As torch's distributed checkpoints ask: one chunk a rank.
        (chunk,) = spread.__create_chunk_list__()
        return TensorPiece(spread.detach().to_local(), tuple(chunk.offsets), tuple(spread.shape))

    return recursively_apply(piece, values, test_type=lambda value: isinstance(value, DTensor))


def _whole_model(
    model: Module | None, own: list[dict[str, Any] | None], name: str, missing: list[str]
) -> tuple[Module | None, dict[str, Any] | None]:
    """Return a model with its weights, and its full state dict; either is None if not available.

    Args:
        model: rank 0's model: with its weights, a copy without weights, or None.
        own: the state dicts of all ranks, with pieces of tensors. The first entry is None if
            ``model`` has its weights.
    """
    if model is not None and own[0] is None:  # it came with its weights
        return model, model.state_dict()
    weights = _whole(own, name, missing)
    if model is None or weights is None:
        return None, weights
    try:
        fill(model, weights)
    except Exception as error:  # whatever classes of the user's do
        missing.append(f"{name}: it takes no weights here ({error}); make it anew and load them")
        return None, weights
    return model, model.state_dict()


def _whole(parts: list[Any], name: str, missing: list[str]) -> Any:
    found = [part for part in parts if part is not None]
    try:
        if found:
            return _joined(found)
        problem = "cannot be put together of what each rank has for itself"
    except ValueError as error:
        problem = str(error)
    missing.append(f"{name}: its state {problem}")
    return None


def _joined(parts: list[Any]) -> Any:
    """Return one value, joined from the corresponding values of all ranks.

    The pieces of a tensor become the full tensor. Dictionaries become one dictionary with the keys
    of all ranks. Items of lists and tuples are joined one by one. Of any other value, the first
    rank's is taken.
    """
    first = parts[0]
    if isinstance(first, TensorPiece):
        # Replicas have the same piece.
        pieces = list({one.offset: one for one in parts if one.values.numel()}.values())
        if sum(piece.values.numel() for piece in pieces) != math.prod(first.shape):
            raise ValueError("lacks pieces that other ranks had")
        whole = torch.empty(first.shape, dtype=first.values.dtype, device="cpu")
        for piece in pieces:
            places = zip(piece.offset, piece.values.shape, strict=True)
            whole[tuple(slice(start, start + size) for start, size in places)] = piece.values
        return whole
    if isinstance(first, dict):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: _joined([part[key] for part in parts if key in part]) for key in keys}
    if isinstance(first, (list, tuple)):
        return honor_type(first, (_joined(list(alike)) for alike in zip(*parts, strict=False)))
    return first


def copy_on_meta(model: Module) -> Module | None:
    """Return a deep copy of a model whose weights are on the meta device and take no memory.

    Buffers, and tensors that are plain attributes of a module, are shared with the model. All else
    is copied, so that later changes of the model, such as hooks, do not reach the copy.

    Returns:
        The copy. None if a weight is not a plain ``torch.nn.Parameter`` (as in quantized models),
        or if deep copying the model fails; training goes on without a copy.
    """
    if any(type(weight) is not Parameter for weight in model.parameters()):
        return None
    # What deepcopy finds here, by identity, it takes as the copy: tied names keep one weight.
    copies: dict[int, Any] = {
        id(value): value
        for part in model.modules()
        for value in (*vars(part).values(), *part.buffers(recurse=False))
        if isinstance(value, torch.Tensor)
    }
    for weight in model.parameters():
        empty = torch.empty_like(weight, device="meta")
        copies[id(weight)] = Parameter(empty, weight.requires_grad)
    try:
        return copy.deepcopy(model, copies)
    except Exception:  # whatever classes of the user's do: such a model is trained all the same
        return None


def fill(meta_copy: Module, weights: Mapping[str, Any]) -> None:
    """Fill a copy of :func:`copy_on_meta` with unsharded weights and buffers, in place.

    Raises:
        Exception: names or shapes of the weights do not match, or user code in the model raised.
    """
    # Not by ``assign=True``: a user's ``load_state_dict`` may not know it, and a module that copies
    # its weights by itself would copy them into nothing.
    made: dict[int, Parameter] = {}
    for name, empty in [*meta_copy.named_parameters(remove_duplicate=False)]:
        if id(empty) not in made:
            made[id(empty)] = Parameter(weights[name], empty.requires_grad)
        owner, _, last = name.rpartition(".")
        setattr(meta_copy.get_submodule(owner), last, made[id(empty)])
    # Buffers, and what modules keep beside their tensors; a weight is copied onto itself.
    meta_copy.load_state_dict(weights)
