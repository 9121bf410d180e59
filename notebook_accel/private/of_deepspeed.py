"""The only place where private names of DeepSpeed are used; a new release may change them."""

from __future__ import annotations

from typing import Any

__all__ = ["forget_groups", "has_stepped_copy"]


def has_stepped_copy(weight: Any) -> bool:
    """Return whether DeepSpeed's optimizer steps a float32 copy of a weight.

    It looks for ``_z3_optimizer`` and ``_hp_mapping``, and returns the same on all ranks, even on
    those that step no part of the weight. Without these names, the float32 copies would be missed:
    the next step would overwrite loaded weights, and saved weights would have only 16 bits.
    """
    return hasattr(weight, "_z3_optimizer") or hasattr(weight, "_hp_mapping")


def forget_groups(library: Any) -> None:
    """Make DeepSpeed drop its process groups (``_release_process_group_references``).

    Called in a rank before a training, if an earlier one used a process group that is gone. Without
    this, the second training of a session would use the old groups and fail.

    Args:
        library: the module ``deepspeed``.
    """
    release = getattr(library.utils.groups, "_release_process_group_references", None)
    if release is not None:
        release(group=None)
