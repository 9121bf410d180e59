"""Accelerate's functions to save, load and merge the weights of FSDP, used by Transformers.

``Accelerator.save_state`` and ``load_state`` do the same for everything that was prepared. The
plugin's ``state_dict_type`` decides which files are written::

    FULL_STATE_DICT       pytorch_model_fsdp.bin      optimizer.bin      by rank 0, whole
    SHARDED_STATE_DICT    pytorch_model_fsdp_0/       optimizer_0/       each rank writes its shards

The sharded folders are the same as those of ``save_state``.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.training import files
from notebook_accel.training.accelerator import Accelerator
from notebook_accel.training.checkpoint.start import resolved
from notebook_accel.training.collectives import gather_object
from notebook_accel.training.files.atomic import complete_version
from notebook_accel.training.preparing import extract_model_from_parallel
from notebook_accel.training.processes import topology
from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.stepping.optimizer import inner_optimizer
from notebook_accel.training.strategies.base import sharded

Path_ = str | os.PathLike[str]
_log = logging.getLogger(__name__)


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: Module,
    output_dir: Path_,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,  # noqa: ARG001
) -> None:
    """Write the weights of a prepared model to a folder; all ranks have to call it.

    Args:
        fsdp_plugin: its ``state_dict_type`` says whether rank 0 writes whole weights, or each rank
            writes its shards.
        accelerator: the ``Accelerator`` that prepared the model.
        model: the prepared model.
        output_dir: the folder, which is created if it does not exist.
        model_index: the model's number in the names of files.
        adapter_only: whether to write only the trainable weights of a PEFT model; no effect on
            other models.
        use_dcp: accepted for Accelerate's signature, without effect.
    """
    own = _inner(model)
    state = accelerator._strategy.state_dict(
        own, full=not fsdp_plugin.saves_shards, keeps=accelerator.is_main_process
    )
    if adapter_only and _is_of_peft(own):
        trained = {name for name, weight in own.named_parameters() if weight.requires_grad}
        state = {name: value for name, value in state.items() if name in trained}
    pieces = _format(fsdp_plugin, accelerator).model_pieces(state, model_index)
    parts = f"{files.FSDP_MODEL_NAME}_{model_index}"
    _write(fsdp_plugin, accelerator, pieces, Path(output_dir), parts)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: Module,
    input_dir: Path_,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,  # noqa: ARG001
) -> None:
    """Load weights that ``save_fsdp_model`` or ``save_state`` wrote; all ranks have to call it.

    Args:
        fsdp_plugin: its ``state_dict_type`` says whether the weights were written whole or as
            shards.
        accelerator: the ``Accelerator`` that prepared the model.
        model: the prepared model.
        input_dir: the folder that was given to the save or, for shards, the folder
            ``pytorch_model_fsdp_0`` in it.
        model_index: the model's number in the names of files.
        adapter_only: whether only the trainable weights of a PEFT model were written.
        use_dcp: accepted for Accelerate's signature, without effect.

    Raises:
        FileNotFoundError: the folder has no saved weights of this number and type.
        RuntimeError: the saved weights lack some of the model's weights.
    """
    own, folder = _inner(model), _folder_of(input_dir, f"{files.FSDP_MODEL_NAME}_{model_index}")
    strict = not (adapter_only and _is_of_peft(own))
    accelerator.wait_for_everyone()
    state = _format(fsdp_plugin, accelerator, strict=strict).read_model(own, folder, model_index)
    if state is not None:
        accelerator._strategy.load_state_dict(own, files.with_ties(state, own), strict=strict)
    accelerator.wait_for_everyone()


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: Module,
    output_dir: Path_,
    optimizer_index: int = 0,
    use_dcp: bool = True,  # noqa: ARG001
) -> None:
    """Write the state of a prepared optimizer to a folder; all ranks have to call it.

    Args:
        fsdp_plugin: its ``state_dict_type`` says whether rank 0 writes the whole state, or each
            rank writes its shards.
        accelerator: the ``Accelerator`` that prepared the optimizer.
        optimizer: the prepared optimizer.
        model: the prepared model whose weights the optimizer steps.
        output_dir: the folder, which is created if it does not exist.
        optimizer_index: the optimizer's number in the names of files.
        use_dcp: accepted for Accelerate's signature, without effect.
    """
    layout = _format(fsdp_plugin, accelerator, model)
    pieces = layout.optimizer_pieces(inner_optimizer(optimizer), optimizer_index)
    parts = f"{files.OPTIMIZER_NAME}_{optimizer_index}"
    _write(fsdp_plugin, accelerator, pieces, Path(output_dir), parts)


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: Module,
    input_dir: Path_,
    optimizer_index: int = 0,
    adapter_only: bool = False,  # noqa: ARG001
    use_dcp: bool = True,  # noqa: ARG001
) -> None:
    """Load an optimizer state that ``save_fsdp_optimizer`` or ``save_state`` wrote.

    All ranks have to call it.

    Args:
        fsdp_plugin: its ``state_dict_type`` says whether the state was written whole or as shards.
        accelerator: the ``Accelerator`` that prepared the optimizer.
        optimizer: the prepared optimizer.
        model: the prepared model whose weights the optimizer steps.
        input_dir: the folder that was given to the save. For shards, its subfolder
            ``optimizer_<optimizer_index>`` is accepted as well.
        optimizer_index: the optimizer's number in the names of files.
        adapter_only: accepted without effect, since an optimizer only has states of trainable
            weights.
        use_dcp: accepted for Accelerate's signature, without effect.

    Raises:
        FileNotFoundError: the folder has no saved state of this number and type.
    """
    own = inner_optimizer(optimizer)
    folder = _folder_of(input_dir, f"{files.OPTIMIZER_NAME}_{optimizer_index}")
    accelerator.wait_for_everyone()
    layout = _format(fsdp_plugin, accelerator, model)
    state = layout.read_optimizer(own, folder, optimizer_index)
    if state is not None:
        accelerator._strategy.load_optimizer_state(own, state)
    accelerator.wait_for_everyone()


def _format(
    plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    *models: Module,
    strict: bool = True,
) -> files.Format:
    writes = accelerator.is_main_process
    return (sharded if plugin.saves_shards else files.Format)(
        stem=files.FSDP_MODEL_NAME,
        safe=False,
        names=files.names_of([*map(_inner, models)]),
        strict=strict,
        writes=writes,
        whole_state=partial(accelerator._strategy.optimizer_state, keeps=writes),
    )


def _inner(model: Module) -> Module:
    inner: Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner


def _is_of_peft(model: Module) -> bool:
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _folder_of(folder: Path_, parts: str) -> Path:
    """Return the folder in which the folder named ``parts`` lies.

    ``folder`` is either of the two: Accelerate takes both.
    """
    path = Path(folder)
    return path.parent if path.name == parts else path


def _write(
    plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    pieces: Iterable[files.Piece],
    folder: Path,
    parts: str,
) -> None:
    """Write the pieces of this rank into a folder; all ranks call it."""
    folder.mkdir(parents=True, exist_ok=True)
    if plugin.saves_shards:  # no file of an earlier save may mix with the new ones
        if accelerator.is_main_process:
            shutil.rmtree(folder / parts, ignore_errors=True)
        accelerator.wait_for_everyone()
    written, results = files.write_one_by_one(pieces, folder)
    everywhere = gather_object([results])
    if accelerator.is_main_process:
        files.complete(written, everywhere)
    accelerator.wait_for_everyone()


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
        target = output / (files.SAFE_WEIGHTS_NAME if safe_serialization else files.WEIGHTS_NAME)
        files.save_object(weights, target, safe=safe_serialization)
        _log.info("merged %d weights of %s into %s", len(weights), given, target)
        if remove_checkpoint_dir:
            shutil.rmtree(given)
    topology.barrier()


def _find_parts(given: Path) -> Path:
    whole = complete_version(given)
    if (whole / ".metadata").exists():
        return whole
    models = sorted(path.parent for path in whole.glob(f"{files.FSDP_MODEL_NAME}_*/.metadata"))
    if len(models) == 1:
        return models[0]
    several = f": it has {len(models)} models, pass the folder of one" if models else ""
    raise FileNotFoundError(
        f"merge_fsdp_weights found no sharded weights of one model{several}; expected a folder "
        f"such as {files.FSDP_MODEL_NAME}_0, with .metadata and .distcp files; given was "
        f"{files.describe_folder(given)}"
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
