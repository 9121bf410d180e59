"""The only place where private names of torchdata are used; a new release may change them."""

from __future__ import annotations

from typing import Any

__all__ = ["num_read"]


def num_read(reader: Any) -> int:
    """Return how many batches a data loader's iterator has given (``_num_yielded``); 0 if unknown.

    For the iterator of a StatefulDataLoader that continues from a restored state, the batches
    before that state count, too. Without this, ``skip_first_batches`` would skip them twice.
    """
    return getattr(reader, "_num_yielded", 0)
