"""Whether a library is installed, asked without importing it."""

from __future__ import annotations

import importlib.util

__all__ = ["is_installed"]


def is_installed(module: str) -> bool:
    """Whether there is such a library.

    A folder of its name does not count: wandb leaves one where it ran, and Python would import that
    as an empty package.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
