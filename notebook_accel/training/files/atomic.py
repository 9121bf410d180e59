"""Files and folders that are complete or not there, whenever the process dies.

A folder is written beside its final path and then renamed to it. If the final path exists already,
the new folder is first moved into the old one, as its *update*::

    rename into the old one, as its update  <- from here on the new one counts
    bring the entries of the old one up to date, by hard links; remove the update

Invariant: at every instant :func:`complete_version` is one of the two complete folders. The old
folder stays in its place, with the user's own entries, because it may be the current directory of
a process, such as the notebook's kernel. The two folders are not swapped, because many shared disks
cannot do that, and because the new one would need a link to each of the user's entries.

Several processes may save side by side. Each holds a lock on the folder that it writes, which ends
with the process. The lock tells the folders of dead writers, which are removed, from those of
living ones. While a folder is begun or published, its parent is locked too.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from notebook_accel.errors import NotebookAccelError

_PARTIAL = ".partial"
_UPDATE = ".notebook_accel_update"
_REMOVED = ".removed.json"  # in an update: entries that belong to the old checkpoint, to remove
# What torch and safetensors say of a disk that takes no more. Torch does not say why: it speaks of
# positions in its archive.
_CANNOT_WRITE = re.compile(r"inline_container\.cc|PytorchStreamWriter|os error (28|122)\b")


@contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new path; the file written to it replaces ``path`` at the end of the block.

    If the block raises, ``path`` stays as it was. So ``path`` is a complete file or none at all.
    """
    final = Path(path)
    staged = staging_path(final)
    try:
        with naming_full_disk(final.parent):
            yield staged
        staged.replace(final)
    finally:
        staged.unlink(missing_ok=True)


@contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Run a block that writes files; a full disk raises ``NotebookAccelError`` that says so."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not is_full and not _CANNOT_WRITE.search(str(error)):
            raise
        raise NotebookAccelError(
            f"what was to be saved in {folder} could not be written; what was there before stays "
            "as it is. Most likely, the disk is full: make room on it, or save to another one. "
            f"What happened: {type(error).__name__}: {error}"
        ) from error


def staging_path(final: Path) -> Path:
    """Return an unused path beside ``final``, on the same disk, to be renamed to ``final``."""
    return final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}{_PARTIAL}")


def remove_dead(parent: Path, pattern: str) -> None:
    """Remove the staged folders of dead writers whose final names ``pattern`` matches."""
    with _locked(parent):
        _sweep(parent, pattern)


def is_staged(path: Path, final_name: str) -> bool:
    """Return whether a path is one that :func:`staging_path` has returned for this name."""
    return re.fullmatch(rf"\.{final_name}\.[0-9a-f]{{8}}{_PARTIAL}", path.name) is not None


class StagedFolder:
    """A temporary folder to write in; :meth:`publish` moves it to its final path.

    No other process removes the folder while the process that made it lives.
    """

    def __init__(self, parent: Path, pattern: str, choose: Callable[[Sequence[str]], str]) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(parent):
            others = _sweep(parent, pattern)
            self.final = parent / choose(others)
            self.path = staging_path(self.final)
            self.path.mkdir()
            lock = os.open(self.path, os.O_RDONLY)
            with suppress(OSError):  # a disk without locks, where nobody sweeps
                fcntl.flock(lock, fcntl.LOCK_EX)
        self._unlock = weakref.finalize(self, os.close, lock)

    @classmethod
    def of(cls, final: Path) -> StagedFolder:
        """Return a new staged folder whose final path is ``final``."""
        return cls(final.parent, re.escape(final.name), lambda _: final.name)

    def publish(self, *, is_ours: Callable[[str], bool]) -> None:
        """Move the staged folder to its final path; a folder that exists there is updated."""
        final = self.final.resolve()
        with _locked(final.parent):
            if final.exists():
                _finish_update(final)  # of a writer that died
                new = os.listdir(self.path)
                # A file that the new folder has too is replaced, not removed, so that a reader who
                # knows nothing of updates always finds one.
                removed = [
                    entry.name
                    for entry in final.iterdir()
                    if is_ours(entry.name) and (entry.is_dir() or entry.name not in new)
                ]
                (self.path / _REMOVED).write_text(json.dumps(removed))
                self.path.rename(final / _UPDATE)
                _finish_update(final)
            else:
                self.path.rename(final)
        self.discard()

    def discard(self) -> None:
        """Remove the staged folder, if it is still there, and release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()


def add_entries(source: Path, final: Path, belongs: Callable[[Path], bool]) -> bool:
    """Move the entries of a folder into a published one, file by file.

    Each is whole or not there.
    """
    final = final.resolve()
    if not final.is_dir():
        return False
    with _locked(final.parent):
        if not belongs(final):
            return False
        _finish_update(final)  # of a writer that died
        _put_entries(source, final, moves=True)
        # Within the lock: its own rank and the one that publishes may both be about to add it.
        shutil.rmtree(source, ignore_errors=True)
    return True


def drop_empty(path: Path, belongs: Callable[[Path], bool]) -> None:
    """Remove a file of a published folder if it is there and empty."""
    folder = path.parent.resolve()
    with suppress(FileNotFoundError), _locked(folder.parent):
        if path.stat().st_size == 0 and belongs(folder):
            path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Run a block while no other process or thread begins or publishes a folder in ``folder``."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a disk without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # by closing alone, a process forked meanwhile would keep it
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _sweep(parent: Path, pattern: str) -> list[str]:
    """Remove the staged folders of dead writers; return the names that living ones are writing.

    Only final names that ``pattern`` matches count.
    """
    partial = re.compile(rf"\.(?P<name>{pattern})\.[0-9a-f]{{8}}{_PARTIAL}")
    found = ((partial.fullmatch(name), parent / name) for name in os.listdir(parent))
    return [match["name"] for match, path in found if match and not _remove_if_dead(path)]


def _remove_if_dead(path: Path) -> bool:
    if _is_own_folder(path):  # else a link of an update that was broken off
        try:
            lock = os.open(path, os.O_RDONLY)
        except OSError:  # of another user
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(lock)
    _remove(path)
    return True


def complete_version(folder: Path) -> Path:
    """Return the folder from which to read what was last published as ``folder``.

    That is ``folder`` itself, unless a writer died while it brought ``folder`` up to date: then it
    is the update inside.
    """
    update = folder / _UPDATE
    return update if _is_own_folder(update) else folder


def _finish_update(final: Path) -> None:
    """Bring ``final`` up to date from the update in it, if it has one; then remove the update.

    The process may die at any step; a later call then begins anew, because the update stays
    unchanged until all is done.
    """
    update = final / _UPDATE
    if update.is_symlink():
        update.unlink()
    if not update.is_dir():
        return
    # Only entries of this folder: an update that came from elsewhere may name paths outside of it.
    present = os.listdir(final)
    for name in json.loads((update / _REMOVED).read_text()):
        if name in present:
            _remove(final / name)
    _put_entries(update, final, moves=False)
    done = staging_path(final)
    update.rename(done)
    shutil.rmtree(done, ignore_errors=True)


def _put_entries(top: Path, final: Path, *, moves: bool) -> None:
    """Put all files of a folder into ``final``, in place of entries of their names.

    They are moved, or stay where they are and get hard links.
    """
    for source, folders, files in os.walk(top):
        target = final / Path(source).relative_to(top)
        links = [name for name in folders if Path(source, name).is_symlink()]
        for name in set(folders) - set(links):
            if not _is_own_folder(target / name):
                _remove(target / name)
                (target / name).mkdir()
        for name in (*files, *links):
            if name != _REMOVED:
                _put(Path(source, name), target / name, staging_path(final), moves=moves)


def _is_own_folder(path: Path) -> bool:
    """Return whether a path is a folder and not a symbolic link, which may lead anywhere."""
    return path.is_dir() and not path.is_symlink()


def _put(source: Path, target: Path, staged: Path, *, moves: bool) -> None:
    if target.exists() and target.samefile(source):
        return  # done before; renaming one link of a file to another does nothing, and leaves both
    if target.is_dir():
        _remove(target)
    if moves:
        with suppress(OSError):  # onto another disk, where a link has led to the folder
            source.replace(target)
            return
    try:
        os.link(source, staged, follow_symlinks=False)
    except OSError:  # a disk without hard links
        shutil.copy2(source, staged, follow_symlinks=False)
    staged.replace(target)


def _remove(path: Path) -> None:
    """Remove a file or folder, if there is one."""
    if _is_own_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
