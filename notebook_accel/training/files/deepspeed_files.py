"""What DeepSpeed writes into a checkpoint, for those that do not train by it.

Each rank writes its parts of the weights and of the optimizer's states::

    pytorch_model/   *_model_states.pt, *_optim_states.pt   DeepSpeed's own, by rank
    latest           the name of that folder
    zero_to_fp32.py  joins the weights, without this package

DeepSpeed reads its files without regard to what they could run, so they are looked through first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.training.files.pieces import Piece
from notebook_accel.training.files.state_files import explain, is_safe_name
from notebook_accel.training.settings.environment import is_installed

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FOLDER", "EnginePiece", "check", "is_in", "read_weights"]

FOLDER = "pytorch_model"
# Plain records of DeepSpeed: they run nothing of their own as they are made.
_RECORDS = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


class EnginePiece(Piece):
    """What an engine writes itself. Its ranks communicate while they write, so all of it is written
    at once, and nothing is left for the background."""

    def __init__(self, engine: Any, options: dict[str, Any]) -> None:
        super().__init__(None, lambda _, __: None)
        self._engine = engine
        self._options = options

    def prepare(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag=FOLDER, **self._options)


def is_in(folder: Path) -> bool:
    """Whether DeepSpeed wrote into this checkpoint."""
    return (folder / FOLDER).is_dir()


def check(folder: Path) -> None:
    """Look through DeepSpeed's files, which it trusts.

    Raises:
        NotebookAccelError: one is broken, or names what is not known to be safe.
    """
    for path in sorted((folder / FOLDER).glob("*.pt")):
        try:
            named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        except Exception as error:
            raise NotebookAccelError(explain(path, error)) from error
        refused = sorted(name for name in named if name not in _RECORDS and not is_safe_name(name))
        if refused:
            raise NotebookAccelError(
                f"{path} names {', '.join(refused)}, which is not read, since a file that names it "
                "could run any code. If you trust the file, call "
                "torch.serialization.add_safe_globals([...]) with it first"
            )


def read_weights(folder: Path) -> dict[str, Any]:
    """The whole weights of the model, in float32 where DeepSpeed stepped them so.

    Args:
        folder: of the checkpoint.

    Raises:
        ConfigError: DeepSpeed, which joins the parts of the ranks, is not installed.
        NotebookAccelError: as of :func:`check`.
    """
    check(folder)
    if not is_installed("deepspeed"):
        raise ConfigError(
            f"{folder} was written by DeepSpeed, which is needed to join its parts: pip install "
            "deepspeed ninja"
        )
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=FOLDER))
