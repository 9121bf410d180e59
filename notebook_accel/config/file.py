"""Reads YAML files of settings, and replaces files atomically."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from pathlib import Path
from typing import IO, Any

import yaml

from notebook_accel.errors import ConfigError

# The middle ones: PyYAML makes what looks like a date, such as 2024-99-99.
_UNREADABLE = (OSError, ValueError, LookupError, AttributeError, RecursionError, yaml.YAMLError)
# No settings are as large, and the metrics of days are not: what is larger is damaged, and to read
# it would take the kernel's memory, or hold its Interrupt up.
_MOST_BYTES = 1_000_000_000


def expanded(path: str | os.PathLike[str]) -> Path:
    """Replace "~" or "~user" by a home folder; ConfigError if that is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{os.fspath(path)!r}: there is no such home folder") from None


def replace_text(file: Path, text: str) -> None:
    """Replace atomically or make; a file keeps its mode, and after OSError its content."""
    mode: int | None = None
    with contextlib.suppress(FileNotFoundError), file.open("r+b") as old:
        # What may not be written raises here, and so is not replaced either.
        mode = stat.S_IMODE(os.fstat(old.fileno()).st_mode)
    part = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        # Not by tempfile, whose files are for their owner alone: a new file heeds the umask.
        part.write_text(text, encoding="utf-8")
        if mode is not None:
            part.chmod(mode)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def not_too_large(file: IO[bytes]) -> IO[bytes]:
    """Return a file of at most 1 GB, to be read into memory; OSError leaves a larger one open."""
    size = os.fstat(file.fileno()).st_size
    if size > _MOST_BYTES:
        raise OSError(
            f"{file.name} has {size / 1e9:,.1f} GB, and at most {_MOST_BYTES // 10**9} GB is read "
            "into memory: read it in parts, or delete it"
        )
    return file


def read_settings(path: Path) -> dict[str, Any]:
    """Return the file's unchecked mapping, {} if empty; ConfigError if it cannot be read as one."""
    if os.path.exists(path) and not os.path.isfile(path):
        # Reading a FIFO or a terminal would wait for its writer for ever.
        raise ConfigError("it is no regular file")
    try:
        with path.open("rb") as file:
            data = yaml.safe_load(not_too_large(file).read().decode())
    except yaml.MarkedYAMLError as error:
        # Without the line itself: it may have a secret of `env`.
        line = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        raise ConfigError(f"it cannot be read: {error.problem}{line}") from None
    except _UNREADABLE as error:
        raise ConfigError(f"it cannot be read: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"it holds a {type(data).__name__}; expected settings, one `name: value` a line"
        )
    # YAML's `no`, without quotes, is False.
    return {**data, "mixed_precision": "no"} if data.get("mixed_precision") is False else data
