"""Read settings from environment variables, and find out whether a library is installed.

Most settings have two variables: ``NOTEBOOK_ACCEL_<NAME>`` comes first, then Accelerate's
``ACCELERATE_<NAME>``.
"""

from __future__ import annotations

import importlib.util
import os

from notebook_accel.config.checks import parse_flag

_PREFIXES = ("NOTEBOOK_ACCEL_", "ACCELERATE_")


def read(name: str) -> str | None:
    """Return NOTEBOOK_ACCEL_``name``, else ACCELERATE_``name``; None if both are unset or empty."""
    found = find(name)
    return None if found is None else os.environ[found].strip()


def read_flag(name: str, default: bool = False) -> bool:
    """Return a setting as a bool, or the default if it is unset. ``name`` is as in :func:`read`."""
    variable = find(name)
    return default if variable is None else parse_flag(variable, os.environ[variable])


def find(name: str) -> str | None:
    """Return the variable that counts, which is set; None if both are unset or empty."""
    variables = (prefix + name for prefix in _PREFIXES)
    return next((variable for variable in variables if os.environ.get(variable, "").strip()), None)


# Transformers reads both.
USE_FSDP = "ACCELERATE_USE_FSDP"
FSDP_READS_ON_RANK_0 = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def enable_fsdp_ram_efficient_loading() -> None:
    """Have Transformers read a checkpoint on rank 0 only; ``prepare`` then shards its weights.

    It sets environment variables that Transformers reads in ``from_pretrained``. Every rank has to
    call it before ``from_pretrained``.
    """
    os.environ.setdefault(USE_FSDP, "True")
    os.environ[FSDP_READS_ON_RANK_0] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Have Transformers read a checkpoint on every rank, by setting an environment variable."""
    os.environ[FSDP_READS_ON_RANK_0] = "False"


def is_installed(module: str) -> bool:
    """Return whether a Python module can be imported.

    A folder without ``__init__.py`` does not count: wandb leaves one, called wandb, in the folder
    where it ran, and Python would import it as an empty package.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
