"""The tracker for TensorBoard, which writes event files to ``logging_dir/project_name``."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from notebook_accel.training.tracking.tracker import (
    LibraryTracker,
    flatten,
    on_main_process,
    with_numbers,
)

_PLAIN = (bool, int, float, str)


class TensorBoardTracker(LibraryTracker):
    """Logs to TensorBoard by a ``SummaryWriter``.

    The writer is that of torch, or that of tensorboardX if the package tensorboard is missing.

    Args:
        run_name: name of the project.
        logging_dir: folder in which each project has a folder for its files.
        **kwargs: arguments for the ``SummaryWriter``: this tracker's entry in the ``init_kwargs``
            of ``init_trackers``.
    """

    name = "tensorboard"
    module = "tensorboard"
    requires_logging_directory = True
    writer = LibraryTracker.tracker

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = Path(logging_dir) / run_name

    @classmethod
    def is_available(cls) -> bool:
        """Whether tensorboard or tensorboardX is installed."""
        return super().is_available() or importlib.util.find_spec("tensorboardX") is not None

    @classmethod
    def library(cls) -> Any:
        """Import the module that has ``SummaryWriter``, and return it."""
        name = "torch.utils.tensorboard" if super().is_available() else "tensorboardX"
        return importlib.import_module(name)

    @on_main_process
    def start(self) -> None:
        """Open the ``SummaryWriter``."""
        self._run = self.library().SummaryWriter(str(self.logging_dir), **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write the settings as TensorBoard's hyperparameters, and to a file ``hparams.yml``.

        As hyperparameters, nested settings get flat names ("key/inner key"), and values that are no
        numbers, bools or texts are written as text. The file keeps lists and nested settings.
        """
        name = str(time.time())
        # The writer takes plain values alone: others go as their text.
        plain = {
            key: value if isinstance(value, _PLAIN) else str(value)
            for key, value in flatten(with_numbers(values))
        }
        self._run.add_hparams(plain, {}, run_name=name)
        self._run.flush()
        folder = self.logging_dir / name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "hparams.yml").open("w") as file:
            yaml.dump(dict(values), file, _TextDumper)

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write a number as a scalar, a dictionary of numbers as one plot, other values as text."""
        for name, value in with_numbers(values).items():
            if isinstance(value, dict):
                self._run.add_scalars(name, value, global_step=step, **kwargs)
            elif isinstance(value, (int, float)):
                self._run.add_scalar(name, value, global_step=step, **kwargs)
            else:
                text = str(value.tolist() if hasattr(value, "tolist") else value)
                self._run.add_text(name, text, global_step=step, **kwargs)
        self._run.flush()

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images.

        Args:
            values: for each name a batch of images, as an array of 4 dimensions.
        """
        for name, images in values.items():
            self._run.add_images(name, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the ``SummaryWriter``, which writes everything that is still in memory."""
        self._run.close()


class _TextDumper(yaml.SafeDumper):
    """YAML writer that writes a value without a YAML type, such as an enum, as its ``str()``."""


_TextDumper.add_multi_representer(dict, _TextDumper.represent_dict)
_TextDumper.add_multi_representer(object, lambda dumper, value: dumper.represent_str(str(value)))
