"""The folders of checkpoints: their names, how to find them, and which entries belong to them.

Numbered checkpoints lie side by side::

    project_dir/checkpoints/     or the folder that ``resume_or_start`` was given
        checkpoint_0/  checkpoint_1/  ...
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from notebook_accel.errors import ConfigError
from notebook_accel.training.files import Format, entries
from notebook_accel.training.files.atomic import StagedFolder
from notebook_accel.training.settings.handlers import ProjectConfiguration
from notebook_accel.training.strategies.base import sharded
from notebook_accel.training.strategies.deepspeed import DeepSpeedFiles

NUMBERED = re.compile(r"checkpoint_(\d+)")
# The states of objects that the user registered.
CUSTOM = re.compile(r"custom_checkpoint_\d+\.pkl")

# The formats of models and optimizers, by the entries that a checkpoint has of each: the first that
# it has any of is how it is read. It has one weights file a model; the several files and the index
# that save_model writes are the user's export, and stay. "latest" stays too: the next DeepSpeed
# checkpoint replaces it, and users have links of that name.
FORMATS: dict[re.Pattern[str], Callable[..., Format]] = {
    re.compile(r"pytorch_model_fsdp_\d+|optimizer_\d+"): sharded,
    re.compile(r"pytorch_model|zero_to_(fp32|torch)\.py"): DeepSpeedFiles,
    re.compile(r"(model|pytorch_model|optimizer)(_\d+)?\.(safetensors|bin)"): Format,
}
_ENTRIES = re.compile(
    r"(scheduler|loader)(_\d+)?\.bin|scaler\.pt|(random_states|custom_checkpoint)_\d+\.pkl"
)
# What save_model writes, too.
_WEIGHTS = re.compile(r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)")


def is_ours(name: str) -> bool:
    """Return whether an entry of this name in a checkpoint's folder belongs to the checkpoint.

    Other entries are the user's: a new checkpoint at the same path does not remove them.
    """
    return any(pattern.fullmatch(name) for pattern in (*FORMATS, _ENTRIES))


def format_in(folder: Path) -> Callable[..., Format]:
    """Return the class of the format of a checkpoint's models and optimizers."""
    names = entries(folder)
    found = (kind for pattern, kind in FORMATS.items() if any(map(pattern.fullmatch, names)))
    return next(found, Format)


def holds_state(names: Iterable[str]) -> bool:
    """Return whether a folder with these entries is a checkpoint, not just exported weights."""
    return any(is_ours(name) and not _WEIGHTS.fullmatch(name) for name in names)


def resolved(folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder, with ``~`` expanded."""
    return Path(folder).expanduser().resolve()


class Numbering:
    """Names, finds and removes numbered checkpoints (``checkpoint_0``, ``checkpoint_1``, ...)."""

    def __init__(self, project: ProjectConfiguration) -> None:
        self.project = project
        self.parent: Path | None = None

    def folder(self) -> Path:
        """Return the folder of the numbered checkpoints."""
        project = self.project
        if self.parent is not None:
            return self.parent
        if not project.automatic_checkpoint_naming or project.project_dir is None:
            raise ConfigError(
                "no folder was given: pass one, or make the Accelerator with "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        return resolved(project.project_dir) / "checkpoints"

    def existing(self) -> list[tuple[int, Path]]:
        """Return (number, folder) of each numbered checkpoint, the oldest first."""
        folder = self.folder()
        found = ((NUMBERED.fullmatch(name), folder / name) for name in entries(folder))
        return sorted((int(match[1]), path) for match, path in found if match)

    def newest(self) -> Path:
        """Return the checkpoint with the highest number, or :meth:`folder` if there is none."""
        found = self.existing()
        return found[-1][1] if found else self.folder()

    def next(self, being_written: Sequence[str] = ()) -> str:
        """Return the name of the next checkpoint, with a number above all existing ones."""
        names = [*entries(self.folder()), *being_written]
        above = [int(match[1]) + 1 for match in map(NUMBERED.fullmatch, names) if match]
        return f"checkpoint_{max([self.project.iteration, *above])}"

    def make(self) -> StagedFolder:
        """Return a new staged folder for the next numbered checkpoint."""
        return StagedFolder(self.folder(), NUMBERED.pattern, self.next)

    def follow(self, written: Path) -> None:
        """Make the next number higher than that of ``written``, if ``written`` is numbered."""
        match = NUMBERED.fullmatch(written.name)
        if match:  # else rank 0 named a folder, and this rank none
            self.project.iteration = int(match[1]) + 1

    def remove_oldest(self) -> None:
        """Remove the oldest checkpoints beyond the user's ``total_limit``, if it is set."""
        limit = self.project.total_limit
        for _, folder in self.existing()[:-limit] if limit is not None else ():
            shutil.rmtree(folder, ignore_errors=True)
