"""Accelerate's functions for weights in parts, for code that saves a model by hand (Transformers').

Each does with one model or optimizer what the methods of ``Accelerator`` do with all that was
prepared. What is written, by ``state_dict_type`` of the plugin::

    FULL_STATE_DICT       pytorch_model_fsdp.bin      optimizer.bin
    SHARDED_STATE_DICT    pytorch_model_fsdp_0/       optimizer_0/       as save_state writes them
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accel.training.collectives import gather_object
from notebook_accel.training.files.pieces import complete, write_one_by_one
from notebook_accel.training.files.state_files import read_state, write_state
from notebook_accel.training.files.weights import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    load_weights,
    numbered,
    with_ties,
)
from notebook_accel.training.preparing.prepare import extract_model_from_parallel
from notebook_accel.training.stepping.optimizer import inner_optimizer

if TYPE_CHECKING:
    import os

    from torch.nn import Module
    from torch.optim import Optimizer

    from notebook_accel.training.accelerator import Accelerator
    from notebook_accel.training.files.pieces import Piece
    from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin

    Path_ = str | os.PathLike[str]

__all__ = [
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: Module,
    output_dir: Path_,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,  # noqa: ARG001
) -> None:
    """Write the weights of a model; all ranks call it.

    Args:
        fsdp_plugin: says whether they are written whole.
        accelerator: which has prepared the model.
        model: as ``prepare`` gave it.
        output_dir: the folder, made if need be.
        model_index: the number in the files' names.
        adapter_only: of a model of PEFT, only the weights that train.
        use_dcp: accepted: no rank waits for another while it writes its parts.
    """
    own = _inner(model)
    state = accelerator._strategy.state_dict(
        own, full=not fsdp_plugin.saves_shards, keeps=accelerator.is_main_process
    )
    if adapter_only and _is_of_peft(own):
        trained = {name for name, weight in own.named_parameters() if weight.requires_grad}
        state = {name: value for name, value in state.items() if name in trained}
    folder = _made(output_dir)
    if fsdp_plugin.saves_shards:
        from notebook_accel.training.files import sharded

        _remove(accelerator, folder / f"{FSDP_MODEL_NAME}_{model_index}")
        _write_parts(accelerator, sharded.model_piece(state, model_index), folder)
    elif accelerator.is_main_process:
        write_state(state, folder / numbered(FSDP_MODEL_NAME, model_index, ".bin"), "the model")
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: Module,
    input_dir: Path_,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,  # noqa: ARG001
) -> None:
    """Read what ``save_fsdp_model`` or ``save_state`` wrote of a model; all ranks call it.

    Args:
        fsdp_plugin: says whether weights were written whole.
        accelerator: which has prepared the model.
        model: as ``prepare`` gave it.
        input_dir: the folder, or the one in it with the parts.
        model_index: the number in the files' names.
        adapter_only: of a model of PEFT, only the weights that train were written.
        use_dcp: accepted, as in ``save_fsdp_model``.

    Raises:
        FileNotFoundError: there are no such weights in the folder.
        RuntimeError: weights of the model are not among them.
    """
    own, folder = _inner(model), Path(input_dir)
    strict = not (adapter_only and _is_of_peft(own))
    accelerator.wait_for_everyone()
    if fsdp_plugin.saves_shards:
        from notebook_accel.training.files import sharded

        parts = f"{FSDP_MODEL_NAME}_{model_index}"
        sharded.read_model(own, _folder_of(folder, parts), model_index, {}, strict=strict)
    else:
        path = folder / numbered(FSDP_MODEL_NAME, model_index, ".bin")
        state = read_state(path) if path.exists() else load_weights(folder, model_index)
        if state is None:
            raise FileNotFoundError(
                f"{path} is not there: save_fsdp_model() writes it with "
                'state_dict_type="FULL_STATE_DICT"'
            )
        accelerator._strategy.load_state_dict(own, with_ties(state, own), strict=strict)
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
    """Write the state of an optimizer; all ranks call it.

    Args:
        fsdp_plugin: says whether it is written whole.
        accelerator: which has prepared the optimizer.
        optimizer: as ``prepare`` gave it.
        model: whose weights it steps.
        output_dir: the folder, made if need be.
        optimizer_index: the number in the files' names.
        use_dcp: accepted, as in ``save_fsdp_model``.
    """
    own, folder = inner_optimizer(optimizer), _made(output_dir)
    if fsdp_plugin.saves_shards:
        from notebook_accel.training.files import sharded

        _remove(accelerator, folder / f"{OPTIMIZER_NAME}_{optimizer_index}")
        names = sharded.names_of([_inner(model)])
        _write_parts(accelerator, sharded.optimizer_piece(own, names, optimizer_index), folder)
    else:
        state = accelerator._strategy.optimizer_state(own, keeps=accelerator.is_main_process)
        if accelerator.is_main_process:
            path = folder / numbered(OPTIMIZER_NAME, optimizer_index, ".bin")
            write_state(state, path, type(own).__name__)
    accelerator.wait_for_everyone()


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
    """Read what ``save_fsdp_optimizer`` or ``save_state`` wrote; all ranks call it.

    Args:
        fsdp_plugin: says whether it was written whole.
        accelerator: which has prepared the optimizer.
        optimizer: as ``prepare`` gave it.
        model: whose weights it steps.
        input_dir: the folder, or the one in it with the parts.
        optimizer_index: the number in the files' names.
        adapter_only: accepted: an optimizer has states of the weights that train alone.
        use_dcp: accepted, as in ``save_fsdp_model``.

    Raises:
        FileNotFoundError: there is no such state in the folder.
    """
    own, folder = inner_optimizer(optimizer), Path(input_dir)
    accelerator.wait_for_everyone()
    if fsdp_plugin.saves_shards:
        from notebook_accel.training.files import sharded

        names = sharded.names_of([_inner(model)])
        parts = f"{OPTIMIZER_NAME}_{optimizer_index}"
        sharded.read_optimizer(own, names, _folder_of(folder, parts), optimizer_index, {})
    else:
        state = read_state(folder / numbered(OPTIMIZER_NAME, optimizer_index, ".bin"))
        accelerator._strategy.load_optimizer_state(own, state)
    accelerator.wait_for_everyone()


def _inner(model: Module) -> Module:
    inner: Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner


def _is_of_peft(model: Module) -> bool:
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _made(folder: Path_) -> Path:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _folder_of(folder: Path, parts: str) -> Path:
    """The folder in which the one with the parts is, which may have been given itself."""
    return folder.parent if folder.name == parts else folder


def _remove(accelerator: Accelerator, parts: Path) -> None:
    """Let nothing of an earlier save stay, such as what a model kept beside its tensors."""
    if accelerator.is_main_process:
        shutil.rmtree(parts, ignore_errors=True)
    accelerator.wait_for_everyone()


def _write_parts(accelerator: Accelerator, piece: Piece, folder: Path) -> None:
    pieces, results = write_one_by_one([piece], folder)
    everywhere = gather_object([results])
    if accelerator.is_main_process:
        complete(pieces, everywhere)
