"""Writing an object once, outside an ``Accelerator``."""

from __future__ import annotations

from typing import Any

from notebook_accel.training import topology
from notebook_accel.training.checkpoint.weights import save_object

__all__ = ["save"]


def save(
    obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object once; the file is whole or not there.

    Args:
        obj: the object, such as a state dict.
        f: path or open file.
        save_on_each_node: the first rank of each machine writes, instead of rank 0 alone.
        safe_serialization: write a dictionary of tensors as safetensors.
    """
    here = topology.topology()
    index = here.local_process_index if save_on_each_node else here.process_index
    if index == 0:
        save_object(obj, f, safe=safe_serialization)
