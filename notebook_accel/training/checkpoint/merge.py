"""Merge the weights of a sharded checkpoint into one file that any library reads."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import torch

from notebook_accel.training.checkpoint.folders import resolved
from notebook_accel.training.files.atomic import complete_version
from notebook_accel.training.files.formats import (
    FSDP_MODEL_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    describe_folder,
    save_object,
)
from notebook_accel.training.processes import topology

_log = logging.getLogger(__name__)


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights of a sharded checkpoint into one file; needs no launch and no model.

    Where several ranks are running, all call it: rank 0 writes, and the others wait for it.

    Args:
        checkpoint_dir: the folder of one model, ``pytorch_model_fsdp_0``, of this library or of
            Accelerate; or the checkpoint with that folder in it, if it has one model.
        output_path: a folder, which is made if it is missing. The file in it is
            ``model.safetensors``, or ``pytorch_model.bin``.
        safe_serialization: True writes ``model.safetensors``, False ``pytorch_model.bin``.
        remove_checkpoint_dir: remove ``checkpoint_dir`` once the file is written.

    Raises:
        FileNotFoundError: there are no sharded weights of one model in the folder.
        NotebookAccelError: a file is damaged.
    """
    given, output = resolved(checkpoint_dir), resolved(output_path)
    parts = _find_parts(given)  # a wrong folder is an error of every rank
    topology.barrier()
    if topology.topology().process_index == 0:
        weights = _read_whole(parts)
        output.mkdir(parents=True, exist_ok=True)
        target = output / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)
        save_object(weights, target, safe=safe_serialization)
        _log.info("merged %d weights of %s into %s", len(weights), given, target)
        if remove_checkpoint_dir:
            shutil.rmtree(given)
    topology.barrier()


def _find_parts(given: Path) -> Path:
    whole = complete_version(given)
    if (whole / ".metadata").exists():
        return whole
    models = sorted(path.parent for path in whole.glob(f"{FSDP_MODEL_NAME}_*/.metadata"))
    if len(models) == 1:
        return models[0]
    several = f": it has {len(models)} models, pass the folder of one" if models else ""
    raise FileNotFoundError(
        f"merge_fsdp_weights found no sharded weights of one model{several}; expected a folder "
        f"such as {FSDP_MODEL_NAME}_0, with .metadata and .distcp files; given was "
        f"{describe_folder(given)}"
    )


def _read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """Return a sharded model's tensors whole, by the weights' names; other values are logged."""
    # Imported here: torch's distributed checkpoints take 0.3 s.
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from notebook_accel.training.files.sharded import read_index, read_parts

    metadata = read_index(folder)
    stored = metadata.state_dict_metadata
    state = {
        key: torch.empty(one.size, dtype=one.properties.dtype, device="cpu")
        for key, one in stored.items()
        if isinstance(one, TensorStorageMetadata)
    }
    others = sorted(stored.keys() - state.keys())
    if others:
        _log.warning("left out of the merged weights, since no tensors: %s", ", ".join(others))
    read_parts(state, folder, alone=True)
    # Torch stores the path of keys to each tensor, ("model", name) where Accelerate wrote
    # {"model": weights}; a flat dictionary has no path.
    paths = {key: (metadata.planner_data or {}).get(key, (key,)) for key in state}
    is_nested = all(len(path) > 1 for path in paths.values())
    return {
        ".".join(map(str, paths[key][1:] if is_nested else paths[key])): value
        for key, value in state.items()
    }
