"""Tracebacks as rich shows them, where ``ACCELERATE_ENABLE_RICH`` asks for it."""

from __future__ import annotations

import functools
from importlib import import_module

from notebook_accel.training.availability import is_rich_available

__all__ = ["install_if_asked"]


def install_if_asked() -> None:
    """Let rich show this process's tracebacks, if the environment says so and rich is there."""
    if is_rich_available():
        _install()


# In IPython each further time would wrap what the time before has put in place.
@functools.cache
def _install() -> None:
    import_module("rich.traceback").install(show_locals=False)
