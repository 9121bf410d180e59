"""The only place where private names of torchdata are used; a new release may change them."""

from __future__ import annotations

from typing import Any

__all__ = ["num_read"]


def num_read(reader: Any) -> int:
    """Return how many batches a data loader's iterator has given (``_num_yielded``); 0 if unknown.

    For a StatefulDataLoader, batches before a restored state count, too. Otherwise
    ``skip_first_batches`` would skip too many batches of a loader that continues from a state.
    """
    return getattr(reader, "_num_yielded", 0)
