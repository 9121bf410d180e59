"""What the modules of a model weigh, in bytes; a meta tensor weighs what it would on a device."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.training.big_modeling.dtypes import as_dtype, dtype_byte_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn import Module

    from notebook_accel.training.big_modeling.dtypes import AnyDtype

__all__ = [
    "calculate_maximum_sizes",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_bytes",
    "convert_file_size_to_int",
    "direct_parts",
    "get_max_layer_size",
    "get_module_leaves",
    "is_whole",
]

_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]I?)B", re.IGNORECASE)


def convert_file_size_to_int(size: int | str) -> int:
    """Turn a size such as ``"2GB"`` or ``"1.5GiB"`` into bytes.

    Powers of ten, or of two with an "i". A small "b" after a power of ten means bits: ``"8Mb"`` is
    a million bytes.

    Raises:
        ConfigError: the text is no size.
    """
    if isinstance(size, int):
        return size
    found = _SIZE.fullmatch(size.strip())
    if found is None:
        raise ConfigError(f'size {size!r}: expected bytes, or a text with a unit such as "5GB"')
    unit = f"{found[2]}B".upper()
    num_bytes = int(float(found[1]) * _UNITS[unit])
    return num_bytes // 8 if size.strip().endswith("b") and "I" not in unit else num_bytes


def convert_bytes(size: float) -> str:
    """Turn bytes into a text with a unit, such as ``"9.31 GB"`` (powers of two)."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def compute_module_sizes(
    model: Module,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Add up the bytes below each name of a model.

    Args:
        model: on any device, meta included.
        dtype: what the weights will be loaded in: a tensor counts by the smaller of this and its
            own type. Whole numbers and flags keep theirs.
        special_dtypes: the type of single tensors, by name.
        buffers_only: count buffers alone.

    Returns:
        bytes by name of module or tensor, ``""`` for the whole; weights with several names count
        once, under the first. Names that weigh nothing are 0.
    """
    limit = None if dtype is None else dtype_byte_size(as_dtype(dtype))
    special = {name: dtype_byte_size(as_dtype(d)) for name, d in (special_dtypes or {}).items()}
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in _tensors(model, buffers_only=buffers_only):
        size = int(tensor.numel() * special.get(name, _bytes_of_one(tensor, limit)))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += size
    return sizes


def _tensors(model: Module, *, buffers_only: bool) -> list[tuple[str, torch.Tensor]]:
    buffers = list(model.named_buffers())
    return buffers if buffers_only else [*model.named_parameters(), *buffers]


def _bytes_of_one(tensor: torch.Tensor, limit: float | None) -> float:
    own = dtype_byte_size(tensor.dtype)
    castable = tensor.is_floating_point() or tensor.is_complex()
    return min(limit, own) if limit is not None and castable else own


def compute_module_total_buffer_size(
    model: Module,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
) -> int:
    """The bytes of all buffers of a model; arguments as of :func:`compute_module_sizes`."""
    sizes = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
    return sizes.get("", 0)


def direct_parts(model: Module, prefix: str = "") -> list[tuple[str, Module | torch.Tensor]]:
    """The parameters, children and buffers that belong to a module itself, with their names."""
    parts: list[tuple[str, Module | torch.Tensor]] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return [(f"{prefix}.{name}" if prefix else name, part) for name, part in parts]


def is_whole(part: Module | torch.Tensor, no_split_module_classes: Sequence[str]) -> bool:
    """Whether a part of a model must stay on one device: it has no children, or its class says so.

    Args:
        part: a module or a tensor.
        no_split_module_classes: names of classes that must not be split.
    """
    if isinstance(part, torch.Tensor):
        return True
    return type(part).__name__ in no_split_module_classes or not list(part.children())


def get_max_layer_size(
    modules: Sequence[tuple[str, Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str],
) -> tuple[int, list[str]]:
    """Find the largest layer: a module without children, or of a class that must not be split.

    Args:
        modules: where to look, as (name, module or tensor).
        module_sizes: as :func:`compute_module_sizes` gives them.
        no_split_module_classes: names of classes that must not be split.

    Returns:
        its bytes, and the names of all layers of that size.
    """
    largest, names = 0, list[str]()
    waiting = list(modules)
    while waiting:
        name, part = waiting.pop(0)
        if not is_whole(part, no_split_module_classes) and isinstance(part, torch.nn.Module):
            children = [(f"{name}.{child}", module) for child, module in part.named_children()]
            waiting = [*children, *waiting]
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """The names below which there is no other name."""
    parents = {name.rpartition(".")[0] for name in module_sizes}
    return [name for name in module_sizes if name not in parents and name]


def calculate_maximum_sizes(model: Module) -> tuple[int, tuple[int, list[str]]]:
    """The bytes of the whole model, and its largest layer as :func:`get_max_layer_size` gives it.

    What must not be split is read from the model's ``_no_split_modules``, where it has them.
    """
    sizes = compute_module_sizes(model)
    no_split = getattr(model, "_no_split_modules", None) or []
    return sizes[""], get_max_layer_size(direct_parts(model), sizes, list(no_split))
