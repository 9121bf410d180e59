"""The only place where private names of torchdata are used; a new release may change them."""

from __future__ import annotations

from typing import Any


def num_read(reader: Any) -> int:
    """Return how many batches a data loader's iterator has given; 0 if unknown.

    For the iterator of a StatefulDataLoader that continues from a restored state, the batches
    before that state count, too. This uses ``_num_yielded``. If torchdata removed it,
    ``skip_first_batches`` would skip those batches twice.
    """
    return getattr(reader, "_num_yielded", 0)
