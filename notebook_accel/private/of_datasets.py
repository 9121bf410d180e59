"""The only place where private names of Hugging Face's datasets are used."""

from __future__ import annotations

from typing import Any


def is_split_by_node(dataset: Any) -> bool:
    """Return whether ``split_dataset_by_node`` made a stream of one rank's samples from another.

    This uses ``IterableDataset._distributed``. If datasets removed it, such a stream would be split
    again, and each rank would read only a part of its samples.
    """
    return bool(getattr(getattr(dataset, "_distributed", None), "world_size", 1) > 1)
