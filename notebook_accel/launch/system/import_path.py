"""Where this process finds modules."""

from __future__ import annotations

import sys

__all__ = ["import_path"]


def import_path() -> list[str]:
    """``sys.path`` as Python reads it: it passes over what is no text, such as a ``Path``."""
    return [entry for entry in sys.path if isinstance(entry, str)]
