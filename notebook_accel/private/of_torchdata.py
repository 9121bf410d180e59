"""Private names of torchdata."""

from __future__ import annotations

from typing import Any

__all__ = ["num_read"]


def num_read(reader: Any) -> int:
    """``_num_yielded`` of a loader's iterator: the batches that it gave, those of its state too.

    Without it ``skip_first_batches`` skips too much of a stream that goes on from a state.
    """
    return getattr(reader, "_num_yielded", 0)
