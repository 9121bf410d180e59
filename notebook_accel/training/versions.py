"""Versions of installed libraries, compared."""

from __future__ import annotations

import importlib.metadata
import operator
from typing import TYPE_CHECKING

import torch
from torch.torch_version import TorchVersion

from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STR_OPERATION_TO_FUNC", "compare_versions", "is_torch_version"]

# The name is Accelerate's.
STR_OPERATION_TO_FUNC: dict[str, Callable[[TorchVersion, str], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


def compare_versions(library_or_version: str, operation: str, requirement_version: str) -> bool:
    """Compare the version of an installed library, or a version, with another.

    Args:
        library_or_version: the name under which it is installed, or a version.
        operation: "==", "!=", ">", ">=", "<" or "<=".
        requirement_version: the version on the right of it.

    Raises:
        ConfigError: there is no such comparison.
        PackageNotFoundError: there is no such library.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ConfigError(
            f"{operation!r} is no comparison: expected {', '.join(STR_OPERATION_TO_FUNC)}"
        )
    found = str(library_or_version)
    if not found[:1].isdigit():
        found = importlib.metadata.version(found)
    # Torch's own type compares any versions by the rules of Python packages.
    return bool(STR_OPERATION_TO_FUNC[operation](TorchVersion(found), requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version, without what stands behind a "+" in it, with another."""
    return compare_versions(str(torch.__version__).partition("+")[0], operation, version)
