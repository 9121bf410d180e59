"""Private names of DeepSpeed."""

from __future__ import annotations

from typing import Any

__all__ = ["forget_groups", "has_stepped_copy"]


def has_stepped_copy(weight: Any) -> bool:
    """Whether DeepSpeed steps a float32 copy of a weight (``_z3_optimizer``, ``_hp_mapping``).

    All ranks find the same, whether they step a part of it or not. Without them loaded weights are
    overwritten by the copies at the next step, and saved ones have 16 bits.
    """
    return hasattr(weight, "_z3_optimizer") or hasattr(weight, "_hp_mapping")


def forget_groups(library: Any) -> None:
    """Have DeepSpeed forget the process groups of a training that has ended.

    Without it the next training of a session meets in groups that are gone, and fails.
    """
    release = getattr(library.utils.groups, "_release_process_group_references", None)
    if release is not None:
        release(group=None)
