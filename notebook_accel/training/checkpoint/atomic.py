"""Files and folders that are there whole or not at all, whenever the process dies."""

from __future__ import annotations

import ctypes
import os
import shutil
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["publish_folder", "replacing_file", "staging_folder", "sweep"]

_PARTIAL = ".partial"
_CURRENT_FOLDER = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE


@contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside ``path`` to write to; it takes its place when the block ends well."""
    final = Path(path)
    staged = staging_folder(final)
    try:
        yield staged
        staged.replace(final)
    finally:
        staged.unlink(missing_ok=True)


def staging_folder(final: Path) -> Path:
    """A name beside ``final``, on the same disk, that nobody else uses."""
    return final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}{_PARTIAL}")


def sweep(final: Path) -> None:
    """Remove what writers of ``final`` left that died on the way."""
    for left in final.parent.glob(f".{final.name}.*{_PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)


def publish_folder(staged: Path, final: Path, *, is_ours: Callable[[str], bool]) -> None:
    """Put ``staged`` in the place of ``final``, in one step where the system can.

    Args:
        staged: a complete folder beside ``final``.
        final: where it is to be; it may exist.
        is_ours: whether an entry of this name in the old folder goes with it. All other entries
            stay.
    """
    final = final.resolve()
    if not final.exists():
        staged.rename(final)
        return
    if Path.cwd().is_relative_to(final):
        _move_entries(staged, final)
        return
    _carry_over(final, staged, is_ours)
    try:
        _exchange(staged, final)
    except (OSError, AttributeError):  # another system, or a disk that cannot
        old = staging_folder(final)
        final.rename(old)
        staged.rename(final)
        staged = old
    shutil.rmtree(staged, ignore_errors=True)


def _move_entries(staged: Path, final: Path) -> None:
    """One entry after the other: a process that sits in the folder must not lose it."""
    for entry in staged.iterdir():
        target = final / entry.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        entry.replace(target)
    staged.rmdir()


def _carry_over(old: Path, new: Path, is_ours: Callable[[str], bool]) -> None:
    """Let what is not ours show in the new folder too, without copying what it holds."""

    def leave_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if is_ours(name)] if Path(folder) == old else []

    shutil.copytree(
        old, new, symlinks=True, ignore=leave_out, copy_function=_link, dirs_exist_ok=True
    )


def _link(source: str, target: str) -> None:
    if os.path.lexists(target):
        return
    with suppress(OSError):
        os.link(source, target, follow_symlinks=False)
        return
    shutil.copy2(source, target, follow_symlinks=False)


def _exchange(first: Path, second: Path) -> None:
    """Let two folders trade places in one step.

    Raises:
        OSError: the disk cannot.
        AttributeError: the system cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.renameat2(
        _CURRENT_FOLDER, os.fsencode(first), _CURRENT_FOLDER, os.fsencode(second), _EXCHANGE
    )
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
