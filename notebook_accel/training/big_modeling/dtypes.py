"""Types of weights by object, text or name, and what one element of each weighs."""

from __future__ import annotations

import re
from enum import Enum
from typing import Union

import torch

from notebook_accel.errors import ConfigError

__all__ = ["AnyDtype", "CustomDtype", "as_dtype", "dtype_byte_size"]


class CustomDtype(Enum):
    """Types of quantised weights that torch packs into bytes; used to estimate sizes alone."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


AnyDtype = Union[torch.dtype, CustomDtype, str]
"""A type of weights, or its name in torch such as ``"float16"``."""

_CUSTOM_BYTES = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}


def as_dtype(dtype: AnyDtype) -> torch.dtype | CustomDtype:
    """The type that an object or a name stands for.

    Raises:
        ConfigError: torch has no type of that name.
    """
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f'dtype={dtype!r}: expected a type of torch, such as "float16"')
    return found


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """The bytes of one element: a flag is an eighth, since a packed one takes a bit."""
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    if dtype == torch.bool:
        return 1 / 8
    packed = re.fullmatch(r"torch\.u?int([1-7])", str(dtype))
    return int(packed[1]) / 8 if packed else dtype.itemsize
