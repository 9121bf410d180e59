"""The last settings that were picked in a folder of notebooks, kept in the user's state folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import platformdirs

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError
from notebook_accel.launch.launcher import notebook_file

__all__ = ["recall", "remember"]


def remember(config: LaunchConfig) -> None:
    """Keep ``config`` for the notebook's folder, its variables aside, which may be secrets.

    Without a word where nothing can be written: nobody asked for it.
    """
    with contextlib.suppress(OSError, RuntimeError):
        replace(config, env=None).save(_path())


def recall() -> LaunchConfig | None:
    """What was kept for the notebook's folder; None where nothing was, or it makes no sense now."""
    with contextlib.suppress(OSError, RuntimeError, ConfigError):
        path = _path()
        return LaunchConfig.load(path) if path.is_file() else None
    return None


def _path() -> Path:
    # The folder's name could be long, or tell strangers what is trained there.
    name = hashlib.sha256(_folder().encode(errors="surrogateescape")).hexdigest()[:16]
    return Path(platformdirs.user_state_dir("notebook-accel")) / "picked" / f"{name}.yaml"


def _folder() -> str:
    """The notebook's, also after ``os.chdir``; the current folder where nobody says which it is."""
    file = notebook_file()
    return os.path.dirname(file) if os.path.isabs(file) else os.getcwd()
