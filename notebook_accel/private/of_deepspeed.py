"""The only place where private names of DeepSpeed are used; a new release may change them."""

from __future__ import annotations

from typing import Any


def has_stepped_copy(weight: Any) -> bool:
    """Return whether DeepSpeed's optimizer steps a float32 copy of a weight.

    The result is the same on all ranks, even on those that step no part of the weight. This looks
    for the attributes ``_z3_optimizer`` and ``_hp_mapping`` of the weight. If DeepSpeed renamed
    them, the float32 copies would be missed: the next step would overwrite loaded weights, and
    saved weights would have only 16 bits.
    """
    return hasattr(weight, "_z3_optimizer") or hasattr(weight, "_hp_mapping")


def forget_groups(library: Any) -> None:
    """Make DeepSpeed drop its process groups.

    A rank calls this before a training if an earlier training used a process group that is gone.
    This uses ``_release_process_group_references``. If DeepSpeed removed it, the second training of
    a session would use the old groups and fail.
    """
    release = getattr(library.utils.groups, "_release_process_group_references", None)
    if release is not None:
        release(group=None)
