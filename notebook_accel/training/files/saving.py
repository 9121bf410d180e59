"""Writing an object once, and reading it, outside an ``Accelerator``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from notebook_accel.training.files.state_files import read_state
from notebook_accel.training.files.weights import save_object
from notebook_accel.training.processes import topology

__all__ = ["load", "save"]


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


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Read what torch wrote, without trusting the file.

    Args:
        f: path or open file.
        map_location: where tensors are put.
        **kwargs: further arguments of ``torch.load``; ``weights_only=False`` trusts the file.

    Raises:
        NotebookAccelError: the file at a path is empty or broken, or names what is not known to be
            safe.
    """
    options = {"map_location": map_location, **kwargs}
    if isinstance(f, (str, os.PathLike)):
        return read_state(Path(f), options)
    return torch.load(f, **options)
