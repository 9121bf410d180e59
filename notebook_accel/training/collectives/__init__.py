"""Collectives of tensors in nested structures, and of Python objects.

The functions that communicate are collectives: all ranks of the group call them, with the same
structure. If there is no process group, each returns its result for a single rank (or for the ranks
that an ``Exchange`` connects). Tensors may be on any device: they are moved to where the group's
backend can send them, and the results are moved back.

Debug mode compares what the ranks give to a collective before it runs. Backends compare nothing. If
the ranks' tensors differ in size or type, gloo kills a rank (SIGABRT), NCCL waits for ever, and
either may give wrong numbers. With ``debug=True`` of the launcher, or ``ACCELERATE_DEBUG_MODE``,
the ranks first tell each other the shapes and types of their tensors, which costs an additional
collective.
"""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from notebook_accel.config.checks import as_choice
from notebook_accel.rank.this_rank import current, has_process_group
from notebook_accel.training.collectives import nested
from notebook_accel.training.settings import environment

# Where a rank keeps whether its code asked for debug mode.
ASKED = "debug mode"


class Exchange:
    """Collectives of ranks that have no process group of torch: here of a single rank.

    Ranks that another library connects (torch_xla) have a derived class. All ranks call all methods
    but ``store``. A rank keeps its own one in ``current().shared``.
    """

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    backend: str | None = None

    def gather(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, of one shape, joined along the first dimension."""
        return leaf

    def reduce(self, leaf: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the "sum", "max" or "min" of the tensors of all ranks, element by element."""
        return leaf

    def broadcast(self, leaf: torch.Tensor, source: int) -> None:
        """Fill ``leaf`` in place with the tensor of the rank ``source``."""

    def gather_object(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks, in order of the ranks."""
        return [mine]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    def store(self) -> Any:
        """Return a key-value store that all ranks reach; here, that of torch's process group.

        Ranks with a process group call this too, since joint saves need the store.
        """
        return dist.group.WORLD.get_group_store()  # type: ignore[union-attr]


_NO_OTHERS = Exchange()


def exchange() -> Exchange:
    """Return the collectives that this rank uses if it has no process group."""
    found: Exchange = current().shared.get(Exchange, _NO_OTHERS)
    return found


class DistributedOperationException(ValueError):  # noqa: N818 (Accelerate's name)
    """The ranks gave tensors of different structures, shapes or types to a collective.

    Raised in debug mode only, on every rank.
    """


def is_debugging() -> bool:
    """Return whether debug mode is on: as ``set_debugging`` set it, or else by the environment."""
    asked: bool | None = current().shared.get(ASKED)
    if asked is not None:
        return asked
    return environment.read_flag("DEBUG") or environment.read_flag("DEBUG_MODE")


def require_agreement(
    operation: str, data: Any, group: dist.ProcessGroup | None, free_dimension: int | None = None
) -> None:
    """In debug mode, raise if the ranks of a group have tensors of different shapes or types.

    All ranks of the group call it.

    Args:
        group: the ranks; None means all.
        free_dimension: a dimension whose size may differ; None: no dimension may.

    Raises:
        DistributedOperationException: structures, shapes or types differ; raised on every rank.
    """
    if not compares(group):
        return
    mine = [
        f"{path} {_describe(leaf, free_dimension)}".lstrip()
        for path, leaf in nested.leaves_with_paths(data, "")
    ]
    _require_equal(operation, objects_of_ranks(mine, group))


def _require_equal(operation: str, everywhere: list[list[str]]) -> None:
    """Raise if the tensors, as ``_describe`` puts them, are not the same on all ranks."""
    if all(of_rank == everywhere[0] for of_rank in everywhere):
        return
    ranks: dict[str, list[str]] = defaultdict(list)
    for rank, of_rank in enumerate(everywhere):
        ranks[", ".join(of_rank) or "nothing"].append(str(rank))
    by_rank = "\n".join(
        f"  rank{'s' * (len(having) > 1)} {', '.join(having)}: {kind}"
        for kind, having in sorted(ranks.items(), key=lambda item: -len(item[1]))
    )
    raise DistributedOperationException(
        f"{operation} was given different tensors by different ranks:\n{by_rank}\n"
        "Expected the same structure, shapes and types on every rank: pad tensors whose sizes "
        "differ (pad_across_processes), or gather_object what is no tensor"
    )


def objects_of_ranks(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return a list with the object ``mine`` of each rank of a group; all of them call it."""
    if not has_process_group():
        return exchange().gather_object(mine)
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, mine, group=group)
    return everywhere


def _describe(leaf: Any, free_dimension: int | None) -> str:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    sizes = [str(size) for size in leaf.shape]
    if free_dimension is not None and -leaf.ndim <= free_dimension < leaf.ndim:
        sizes[free_dimension] = "any"
    return f"{str(leaf.dtype).removeprefix('torch.')} ({', '.join(sizes)})"


# What every backend gathers as it is; the others travel as bytes.
_CARRIED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32}
)


class _GroupFacts(NamedTuple):
    """Cached facts about a process group that every gather needs.

    Computing them anew each time took half as long as gathering 4 KB (25 us of Python, and six
    times that in a training step, whose own work has emptied the processor's caches).
    """

    size: int
    compares: bool
    carries_cpu: bool


_ALONE = _GroupFacts(size=1, compares=False, carries_cpu=True)
# Weak: a group that was destroyed must not live on here, gloo's threads would with it.
_facts_of: MutableMapping[Any, _GroupFacts] = WeakKeyDictionary()


def _facts(group: dist.ProcessGroup | None) -> _GroupFacts:
    asked = dist.group.WORLD if group is None and dist.is_available() else group
    if asked is None:
        size = exchange().size
        return _ALONE if size == 1 else _GroupFacts(size, is_debugging(), carries_cpu=False)
    facts = _facts_of.get(asked)
    if facts is None:
        size = num_ranks(group)
        facts = _facts_of[asked] = _GroupFacts(
            size=size,
            compares=size > 1 and is_debugging(),
            carries_cpu=transport_device(torch.device("cpu"), group).type == "cpu",
        )
    return facts


def set_debugging(asked: bool | None) -> None:
    """Turn debug mode on or off, or (None) let the environment decide; all ranks call it."""
    current().shared[ASKED] = asked
    _facts_of.clear()


def num_ranks(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks in ``group`` (None: of all ranks); 1 if this rank runs alone."""
    return dist.get_world_size(group) if has_process_group() else exchange().size


def this_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this rank's number in ``group`` (None: of all ranks); 0 if it runs alone."""
    return dist.get_rank(group) if has_process_group() else exchange().rank


def gather(tensor: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """Join every tensor of a nested structure over the ranks, along dimension 0; all ranks call it.

    A tensor of shape ``(n, ...)`` becomes ``(num_ranks * n, ...)``, in order of the ranks; one
    without a dimension becomes ``(num_ranks,)``. The result carries no gradient, except that a rank
    that is alone gets its own tensors back.

    Args:
        tensor: tensors of the same shapes on every rank (``pad_across_processes`` can make them
            equal). Debug mode compares the shapes.
        group: the ranks; None means all.

    Raises:
        DistributedOperationException: in debug mode, the tensors of the ranks differ in shape or
            type.
    """
    facts = _facts(group)
    if facts.compares:
        require_agreement("gather", tensor, group)
    if type(tensor) is torch.Tensor:
        return _gather(tensor, group, facts)
    return nested.recursively_apply(_gather, tensor, group, facts, error_on_other_type=True)


def _gather(
    leaf: torch.Tensor, group: dist.ProcessGroup | None, facts: _GroupFacts
) -> torch.Tensor:
    leaf = leaf if leaf.ndim else leaf.reshape(1)
    if facts.size == 1:
        return leaf
    if not has_process_group():
        return exchange().gather(leaf)
    sent = leaf
    is_in_memory = facts.carries_cpu and leaf.is_cpu and leaf.is_contiguous()
    # Of a conjugate or negative view, the memory has other values.
    if not is_in_memory or leaf.requires_grad or leaf.is_conj() or leaf.is_neg():
        sent = _sendable(leaf, group)
    out = torch.empty(
        (facts.size * sent.shape[0], *sent.shape[1:]), dtype=sent.dtype, device=sent.device
    )
    # Its older name warns since torch 2.13; the newer one is not in 2.9.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    if sent.dtype in _CARRIED:
        all_gather(out, sent, group=group)
    else:
        all_gather(as_bytes(out), as_bytes(sent), group=group)
    return out if sent.device == leaf.device else out.to(leaf.device)


def _sendable(leaf: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    # gloo sends the memory of a tensor with strides as it lies, without a word.
    leaf = leaf.detach().resolve_conj().resolve_neg()
    return leaf.to(transport_device(leaf.device, group)).contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a view of bytes.

    Backends refuse some types (uint16, float8) that they could copy as well as any other.
    """
    return tensor.reshape(-1).view(torch.uint8)


def transport_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device from which the group sends a tensor that is on ``device``."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    backends = dict(pairs)
    if device.type == "cpu" and "cpu" in backends:
        return device
    # gloo names devices beside the CPU for which it lacks most collectives.
    fast = [kind for kind, backend in backends.items() if kind != "cpu" and backend != "gloo"]
    if device.type in fast:
        return device
    return torch.device("cpu" if "cpu" in backends else fast[0])


def gather_ragged(
    tensors: Sequence[torch.Tensor], *, group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Join the tensors of all ranks, which may differ in their number of rows.

    All ranks call it.
    """
    if num_ranks(group) == 1:
        return list(tensors)
    described = [(f"[{index}] {_describe(one, 0)}", len(one)) for index, one in enumerate(tensors)]
    everywhere: list[list[tuple[str, int]]] = objects_of_ranks(described, group)
    _require_equal("gather", [[text for text, _ in of_rank] for of_rank in everywhere])
    joined: list[torch.Tensor] = []
    for index, tensor in enumerate(tensors):
        sizes = [of_rank[index][1] for of_rank in everywhere]
        longest = max(sizes)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor.detach()
        gathered = torch.split(_gather(padded, group, _facts(group)), longest or 1)
        joined.append(torch.cat([part[:n] for part, n in zip(gathered, sizes, strict=False)]))
    return joined


def compares(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether debug mode compares the arguments before each collective of the group."""
    return _facts(group).compares


def gather_object(object: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:  # noqa: A002
    """Return the objects of all ranks in one list, in order of the ranks; all ranks call it.

    Args:
        object: a list or tuple of picklable objects, whose items are joined. Anything else (a
            string too) counts as one object.
        group: the ranks; None means all.
    """
    plain = isinstance(object, (list, tuple)) and not nested.is_namedtuple(object)
    mine = list(object) if plain else [object]
    if num_ranks(group) == 1:
        return mine
    return list(itertools.chain.from_iterable(objects_of_ranks(mine, group)))


def broadcast(tensor: Any, from_process: int = 0, *, group: dist.ProcessGroup | None = None) -> Any:
    """Fill tensors with those of one rank, in place; all ranks call it.

    Args:
        tensor: a tensor, or lists, tuples and mappings of tensors; the same shapes and types on all
            ranks.
        from_process: the rank whose values the others get, by its number among all ranks.
        group: the ranks; None means all.

    Returns:
        The same structure.

    Raises:
        TypeError: something in the structure is not a tensor.

    Example:
        >>> import torch
        >>> from notebook_accel import broadcast
        >>> broadcast(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    require_agreement("broadcast", tensor, group)
    return nested.recursively_apply(
        _broadcast, tensor, from_process, group, error_on_other_type=True
    )


def _broadcast(leaf: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    if num_ranks(group) == 1:
        return leaf
    if not has_process_group():
        exchange().broadcast(leaf, source)
        return leaf
    sent = _sendable(leaf, group)
    dist.broadcast(as_bytes(sent), src=source, group=group)
    if sent.data_ptr() != leaf.data_ptr():
        leaf.detach().copy_(sent)
    return leaf


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Fill a list with the picklable objects of one rank, in place; all ranks call it.

    Args:
        object_list: the list; the same length on all ranks.
        from_process: the rank whose objects the others get, by its number among all ranks.
        group: the ranks; None means all.

    Returns:
        The same list.

    Example:
        >>> from notebook_accel.utils import broadcast_object_list
        >>> broadcast_object_list([{"seed": 3}])
        [{'seed': 3}]
    """
    if not has_process_group():
        if num_ranks() > 1:
            object_list[:] = exchange().gather_object(object_list)[from_process]
    elif num_ranks(group) > 1:
        dist.broadcast_object_list(object_list, src=from_process, group=group)
    return object_list


def scatter(buffers: Sequence[torch.Tensor] | None, num_bytes: int) -> torch.Tensor:
    """Send each rank one of rank 0's byte buffers (None on others); all ranks call it."""
    if not has_process_group():
        rows = torch.zeros((num_ranks(), num_bytes), dtype=torch.uint8, device="cpu")
        if buffers is not None:
            rows = torch.stack([*buffers])
        exchange().broadcast(rows, 0)
        return rows[this_rank()]
    device = transport_device(torch.device("cpu"))
    received = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    sent = None if buffers is None else [buffer.to(device) for buffer in buffers]
    dist.scatter(received, sent, src=0)
    return received.cpu()


def reduce(
    tensor: Any,
    reduction: str = "mean",
    scale: float = 1.0,  # noqa: ARG001
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Combine every tensor of a structure over the ranks, element by element; all ranks call it."""
    if reduction == "none":
        return tensor
    as_choice("reduction", reduction, [*_REDUCTIONS, "none"])
    require_agreement("reduce", tensor, group)
    return nested.recursively_apply(_reduce, tensor, reduction, group, error_on_other_type=True)


_REDUCTIONS = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN"}


def _reduce(leaf: torch.Tensor, reduction: str, group: dist.ProcessGroup | None) -> torch.Tensor:
    total = leaf.detach().to(torch.int64 if leaf.dtype == torch.bool else leaf.dtype)
    if not has_process_group():
        total = exchange().reduce(total, _REDUCTIONS[reduction].lower())
    elif num_ranks(group) > 1:
        total = _sendable(total, group).clone()
        dist.all_reduce(total, op=getattr(dist.ReduceOp, _REDUCTIONS[reduction]), group=group)
        total = total.to(leaf.device)
    if reduction == "mean":
        return total / num_ranks(group)
    return total.clone() if total.data_ptr() == leaf.data_ptr() else total


class CannotPadNestedTensorWarning(UserWarning):
    """``pad_across_processes`` got a tensor of torch's nested layout and left it unchanged."""


def pad_across_processes(
    tensor: Any,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Pad as the public function does (``data_group``), over ``group``; None means all ranks."""
    require_agreement("pad_across_processes", tensor, group, dim)

    def pad_across_processes(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_nested:
            warnings.warn(
                "pad_across_processes leaves a tensor of torch's nested layout as it is: pad its "
                "parts with torch.nested.to_padded_tensor first",
                CannotPadNestedTensorWarning,
                stacklevel=2,
            )
            return leaf
        if not -leaf.ndim <= dim < leaf.ndim:
            return leaf
        size = leaf.shape[dim]
        missing = int(_reduce(torch.tensor([size]), "max", group)) - size
        if not missing:
            return leaf
        shape = list(leaf.shape)
        shape[dim] += missing
        padded = leaf.new_full(shape, pad_index)
        padded.narrow(dim, missing if pad_first else 0, size).copy_(leaf)
        return padded

    return nested.recursively_apply(pad_across_processes, tensor, error_on_other_type=True)


def split_between(
    inputs: Any, num_processes: int, process_index: int, apply_padding: bool = False
) -> Any:
    """Return the part of ``inputs`` for one process, without changing ``inputs``; no collective.

    Parts are contiguous. If the length does not divide evenly, the first processes get one item
    more.

    Args:
        inputs: a list, tuple, tensor, array, dataset with a method ``select``, or a dict of these
            with equal lengths. Anything else is returned whole for every process.
    """
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items() if _is_divisible(value)}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                "the values of a dict are divided alike, but their lengths differ: "
                f"{lengths}; make them equal, or divide them one by one"
            )
        return nested.rebuild(
            inputs,
            {
                key: split_between(value, num_processes, process_index, apply_padding)
                for key, value in inputs.items()
            },
        )
    if num_processes == 1 or not _is_divisible(inputs):
        return inputs
    quotient, extra = divmod(len(inputs), num_processes)
    start = process_index * quotient + min(process_index, extra)
    length = quotient + (process_index < extra)
    missing = quotient + bool(extra) - length if apply_padding else 0
    return _take(inputs, range(start, start + length), missing)


def _is_divisible(inputs: Any) -> bool:
    if isinstance(inputs, (torch.Tensor, np.ndarray)):
        return inputs.ndim > 0
    return isinstance(inputs, (list, tuple)) or callable(getattr(inputs, "select", None))


def _take(inputs: Any, part: range, repeats: int) -> Any:
    """Return the items at the indices ``part``, then the last of ``inputs`` ``repeats`` times."""
    indices = [*part, *[len(inputs) - 1] * repeats]
    if isinstance(inputs, (torch.Tensor, np.ndarray)):
        return inputs[indices] if repeats else inputs[part.start : part.stop]
    if isinstance(inputs, (list, tuple)):
        return (list if isinstance(inputs, list) else tuple)(inputs[i] for i in indices)
    return inputs.select(indices)
