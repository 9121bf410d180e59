"""The files of a checkpoint one by one, for code that has a ``save_state`` of its own.

These are the functions of ``accelerate.checkpointing``, with Accelerate's file names. Subclasses of
``Accelerator`` and training frameworks call them in place of ``save_state`` and ``load_state``,
which write a folder that is whole or not there, and know where in its data a loop stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.training import topology
from notebook_accel.training.checkpoint.file_names import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    SAFE_MODEL_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)
from notebook_accel.training.checkpoint.start import random_states_file, read_random_states
from notebook_accel.training.checkpoint.weights import load_weights, numbered, with_ties
from notebook_accel.training.data.joined import is_stateful
from notebook_accel.training.random_states import get_random_states, set_random_states
from notebook_accel.training.saving import load, save

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

__all__ = [
    "load_accelerator_state",
    "load_custom_state",
    "save_accelerator_state",
    "save_custom_state",
]


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: Sequence[dict[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: torch.amp.GradScaler | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write states into a folder, which has to be there; give the folder.

    Args:
        output_dir: the folder.
        model_states: what ``get_state_dict`` gave of each model.
        optimizers, schedulers: those whose ``state_dict()`` is kept.
        dataloaders: the state is kept of those that are torchdata's.
        process_index: this rank, whose random states get a file of their own.
        step: batches of the open window.
        scaler: the loss scaler, if there is one.
        save_on_each_node: the first rank of each machine writes, instead of rank 0 alone.
        safe_serialization: weights as safetensors.
    """
    folder = Path(output_dir)
    stem, ending = (SAFE_MODEL_NAME, ".safetensors") if safe_serialization else (MODEL_NAME, ".bin")
    for index, state in enumerate(model_states):
        path = folder / numbered(stem, index, ending)
        save(state, path, save_on_each_node, safe_serialization=safe_serialization)
    for name, item in _stateful(optimizers, schedulers, dataloaders, scaler):
        save(item.state_dict(), folder / name, save_on_each_node)
    states = {**get_random_states(topology.topology().device), "step": step}
    torch.save(states, folder / random_states_file(process_index))
    return folder


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: torch.amp.GradScaler | None = None,
    map_location: Any = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Read what ``save_accelerator_state`` wrote; give the ``Accelerator`` attributes to set.

    Args:
        input_dir: the folder.
        models, optimizers, schedulers, dataloaders, scaler: as they were saved, in that order.
        process_index: the rank whose random states are taken.
        map_location: "cpu" (None too) or "on_device".
        load_kwargs: arguments of ``torch.load`` for states of optimizers and schedulers.
        **load_model_func_kwargs: arguments of the models' ``load_state_dict``.

    Raises:
        ConfigError: ``map_location`` is another one.
        FileNotFoundError: a file is not there.
        NotebookAccelError: a file is broken.
    """
    if map_location not in (None, "cpu", "on_device"):
        raise ConfigError(f"map_location={map_location!r}: expected None, 'cpu' or 'on_device'")
    folder, here = Path(input_dir), topology.topology()
    device = here.device if map_location == "on_device" else "cpu"
    for index, model in enumerate(models):
        state = load_weights(folder, index, {"map_location": device})
        if state is None:
            raise FileNotFoundError(
                f"there are no weights of model {index} in {folder}: expected "
                f"{numbered(SAFE_MODEL_NAME, index, '.safetensors')} or "
                f"{numbered(MODEL_NAME, index, '.bin')}"
            )
        model.load_state_dict(with_ties(state, model), **load_model_func_kwargs)
    for name, item in _stateful(optimizers, schedulers, dataloaders, scaler):
        item.load_state_dict(load(folder / name, device, **(load_kwargs or {})))
    states = read_random_states(folder, process_index)
    if states is None:
        return {}
    set_random_states(states, here.device)
    return {"step": states["step"]} if "step" in states else {}


def save_custom_state(
    obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False
) -> None:
    """Write ``obj.state_dict()`` into the folder ``path``, as ``custom_checkpoint_{index}.pkl``."""
    save(obj.state_dict(), Path(path) / _custom_file(index), save_on_each_node)


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Give ``obj`` the state that ``save_custom_state`` wrote. The file is trusted: it may run any
    code, as Accelerate's function lets it."""
    obj.load_state_dict(load(Path(path) / _custom_file(index), "cpu", weights_only=False))


def _custom_file(index: int) -> str:
    return f"custom_checkpoint_{index}.pkl"


def _stateful(
    optimizers: Sequence[Any], schedulers: Sequence[Any], dataloaders: Sequence[Any], scaler: Any
) -> Iterator[tuple[str, Any]]:
    """The files of all that has a state of its own, and it."""
    for index, optimizer in enumerate(optimizers):
        yield numbered(OPTIMIZER_NAME, index, ".bin"), optimizer
    for index, scheduler in enumerate(schedulers):
        yield numbered(SCHEDULER_NAME, index, ".bin"), scheduler
    for index, loader in enumerate(dataloaders):
        if is_stateful(loader):
            yield numbered("dl_state_dict", index, ".bin"), loader
    if scaler is not None:
        yield SCALER_NAME, scaler
