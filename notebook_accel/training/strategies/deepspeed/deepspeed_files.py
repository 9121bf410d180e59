"""The files that DeepSpeed writes into a checkpoint, and how to read weights from them.

A training without DeepSpeed can read the weights, but not the optimizer's states. Each rank writes
its parts of both::

    pytorch_model/   *_model_states.pt, *_optim_states.pt   DeepSpeed's own, by rank
    latest           holds the name "pytorch_model"
    zero_to_fp32.py  joins the weights, without this package

DeepSpeed unpickles its files, which can run any code. So the files are checked first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.training.files.formats import Format, Piece
from notebook_accel.training.files.state_files import explain, is_safe_name
from notebook_accel.training.settings.environment import is_installed
from notebook_accel.training.settings.notices import notice_once

FOLDER = "pytorch_model"
# Plain records of DeepSpeed: they run nothing of their own as they are made.
_RECORDS = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


class EnginePiece(Piece):
    """The piece of a checkpoint that a DeepSpeed engine writes itself: models and optimizers.

    DeepSpeed's ranks communicate while they write. So ``prepare``, which all ranks call, writes
    everything, and nothing is left to write in the background.
    """

    def __init__(self, engine: Any, options: dict[str, Any]) -> None:
        super().__init__(None, lambda _, __: None)
        self._engine = engine
        self._options = options

    def prepare(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag=FOLDER, **self._options)


@dataclass(kw_only=True)
class DeepSpeedFiles(Format):
    """Models and optimizers that a DeepSpeed engine has written, or is to write."""

    engine: Any = None

    def pieces(self, weights: Sequence[Any], optimizers: Sequence[Optimizer]) -> Iterator[Piece]:
        yield EnginePiece(self.engine, self.options)

    def read_model(self, model: Module, folder: Path, index: int) -> dict[str, Any]:
        """Return the model's whole weights, in float32 if DeepSpeed kept them so."""
        if (folder / "model.safetensors").exists():  # by save_model
            return super().read_model(model, folder, index) or {}
        self.check_trust(folder)
        if not is_installed("deepspeed"):
            raise ConfigError(
                f"{folder} was written by DeepSpeed, which is needed to join its parts: pip "
                "install deepspeed ninja"
            )
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=FOLDER))

    def read_optimizer(self, optimizer: Optimizer, folder: Path, index: int) -> None:
        notice_once(
            "deepspeed optimizer",
            f"{folder} was written under DeepSpeed: its weights were read, and optimizers "
            "begin anew",
        )

    def check_trust(self, folder: Path) -> None:
        """Raise ``NotebookAccelError`` if unpickling DeepSpeed's files could run harmful code."""
        for path in sorted((folder / FOLDER).glob("*.pt")):
            try:
                named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            except Exception as error:
                raise NotebookAccelError(explain(path, error)) from error
            unknown = (name for name in named if name not in _RECORDS and not is_safe_name(name))
            if refused := sorted(unknown):
                raise NotebookAccelError(
                    f"{path} names {', '.join(refused)}, which is not read, since a file that "
                    "names it could run any code. If you trust the file, call "
                    "torch.serialization.add_safe_globals([...]) with it first"
                )
