"""The environment of the kernel that processes for ranks get."""

from __future__ import annotations

import os

# What a kernel leaves in its environment that would mislead a rank: the beginnings of names, and
# whole names, of which one is a secret. What torchelastic sets is named exactly: ROLE_ARN or
# GROUP_ID are somebody's own.
_KERNELS_OWN = ("JPY_", "PYDEVD_")
_KERNELS_OWN_NAMES = (
    *("MPLBACKEND", "NOTEBOOK_ACCEL_JOIN_TOKEN", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)


def kept_environment() -> dict[str, str]:
    """Return this process's environment variables, without those that would mislead a rank.

    Left out are variables of the Jupyter kernel, and those that torchrun sets (``RANK``).
    """
    return {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(_KERNELS_OWN) and name not in _KERNELS_OWN_NAMES
    }
