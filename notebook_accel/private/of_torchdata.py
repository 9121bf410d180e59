"""Private names of torchdata."""

from __future__ import annotations

from typing import Any

__all__ = ["num_read"]


def num_read(reader: Any) -> int:
    """Return how many batches a loader's iterator gave, restored ones included.

    Without it ``skip_first_batches`` skips too much of a stream that goes on from a state.
    """
    return getattr(reader, "_num_yielded", 0)
