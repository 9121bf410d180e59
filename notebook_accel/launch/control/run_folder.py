"""The folder of a run on disk, with logs, metrics and state, and the removal of old run folders.

    runs folder/
      .kernel-3f2a…            lock file of one kernel process, locked while that process lives
      20260131-120000-1a2b3c/  one run, readable by its owner alone
        .live                  name of the lock file of the kernel that still uses the run
        rank-0.log, …          all output of each rank, as its agent writes it (launch/agent)
        metrics.jsonl          values given to accelerator.log (metrics_file.py)
        config.yaml            settings of the launch
        begin.msgpack          the first RunState
        state.msgpack          the final RunState
        rescued.pt             state dicts of the training, if the run was stopped

A run that a live kernel still uses is never deleted. Of all other runs the newest are kept: at most
50, of at most 2 GB together.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import fcntl
import os
import re
import secrets
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import msgspec
import platformdirs

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import LaunchError, NotebookAccelError
from notebook_accel.launch.control.run_state import RunState
from notebook_accel.launch.text.terminal_text import as_shown
from notebook_accel.launch.transport.channel import encode
from notebook_accel.system.interrupts import held
from notebook_accel.system.limits import TOO_MANY_FILES, too_many_files
from notebook_accel.system.own_files import (
    FULL_DISK,
    log_path,
    make_folder,
    open_folder,
    open_to_read,
    own_file,
)

# Of runs that nobody holds any more, the newest stay: enough for some days of work, and no more of
# the disk than anybody would miss.
_KEPT_RUNS = 50
_DAY_SECONDS = 86_400
_KEPT_BYTES = 2_000_000_000
# Of what was being trained, so much is written at the end of a run, which takes a second or two.
_RESCUED_BYTES = 1_000_000_000
# The final state of a detached run rarely has more: the last output of some ranks.
_STATE_BYTES = 500_000
_LIVE = ".live"
# Two files: where one takes the place of another, ext4 writes it to the disk at once, which takes a
# millisecond, and holds up what is made next. A short cell would take a tenth longer by it.
_BEGIN, _STATE = "begin.msgpack", "state.msgpack"
_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_KERNEL = re.compile(r"\.kernel-[0-9a-f]{12}")
_REMEDY = (
    "Make room on its disk, or set NOTEBOOK_ACCEL_RUNS to a folder on another one that can be "
    "written"
)


def runs_folder() -> Path:
    """Return the folder of all runs.

    It is the value of the environment variable ``NOTEBOOK_ACCEL_RUNS`` or, if that is not set,
    ``runs`` in the platform's state folder for this package (``platformdirs``).
    """
    chosen = os.environ.get("NOTEBOOK_ACCEL_RUNS")
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        folder = Path(platformdirs.user_state_dir("notebook-accel")) / "runs"
        if folder.is_absolute():
            return folder
    except RuntimeError:  # of platformdirs; older versions give a relative folder instead
        pass
    raise LaunchError(
        "this user has no home folder, where the logs and metrics of runs are kept: set HOME, or "
        "NOTEBOOK_ACCEL_RUNS to a folder that can be written"
    )


# The settings that were saved last, and their text: writing YAML takes 2 ms, and all cells of a
# session have the same settings.
_saved: tuple[LaunchConfig, str] | None = None


def _text_of(config: LaunchConfig) -> str:
    """Return the settings as YAML, without ``env``, whose environment variables may be secrets."""
    global _saved
    saved = _saved
    if saved is None or saved[0] is not config:
        saved = _saved = config, replace(config, env=None).to_yaml()
    return saved[1]


# What this process holds.
_held_here: weakref.WeakValueDictionary[Path, RunFolder] = weakref.WeakValueDictionary()


class RunFolder:
    """The folder of one run.

    As long as the object that :meth:`make` returned exists, no launch of any kernel removes the
    folder.
    """

    def __init__(self, path: Path) -> None:
        self.id = path.name
        self.path = path
        self.config_path = path / "config.yaml"
        self._rescued_path = path / "rescued.pt"
        # A keeper's main thread saves a state for other kernels while the run's own thread may.
        self._saving = threading.Lock()

    @classmethod
    def make(cls, root: Path | None = None, *, run_id: str = "") -> RunFolder:
        """Make the folder of a new run.

        Args:
            root: folder of all runs; None for :func:`runs_folder`.
            run_id: id of the run; "" for a new one.
        """
        root = runs_folder() if root is None else root
        folder = cls(root / (run_id or new_run_id()))
        folder.create()
        weakref.finalize(folder, _let_go, folder.path / _LIVE, os.getpid())
        _held_here[folder.path] = folder
        return folder

    def create(self) -> None:
        root = self.path.parent
        with making_files(root):
            make_folder(root)
            with open_folder(root) as opened:
                os.mkdir(self.id, 0o700, dir_fd=opened)
            with open(self.path / _LIVE, "x", opener=own_file) as file:
                file.write(_kernel_file(root).name)

    def remove_old(self) -> None:
        """Remove the folders of old runs, but not this one; takes at least 10 ms.

        Runs that a live kernel uses are kept. Of all others the newest are kept: at most 49 (50
        with this one), of at most 2 GB together. An error is ignored: a later launch tries again.
        """
        root = self.path.parent
        with contextlib.suppress(OSError, LaunchError):
            # Lock files of kernels that died more than a day ago: a new one may not be locked yet.
            for entry in os.scandir(root):
                found = entry.stat(follow_symlinks=False)
                is_old = found.st_mtime < time.time() - _DAY_SECONDS
                is_own = found.st_uid == os.geteuid() and _KERNEL.fullmatch(entry.name)
                if is_old and is_own and not _is_locked(Path(entry.path)):
                    os.unlink(entry.path)
            kept, num_bytes = 1, 0  # this run is among those that stay
            for folder in reversed(run_folders(root)):
                if folder.id == self.id or folder.is_held:
                    continue
                size = _size(folder.path)
                if kept == _KEPT_RUNS or num_bytes + size > _KEPT_BYTES:
                    folder.remove()  # one that is too large takes no place of older, small ones
                else:
                    kept, num_bytes = kept + 1, num_bytes + size

    @property
    def is_held(self) -> bool:
        """Whether a live kernel still uses the run, so that the folder must not be removed."""
        # A sweep of 1,000 trials holds as many, and each launch asks for all of them.
        if self.path in _held_here:
            return True
        try:
            with open(self.path / _LIVE, errors="replace", opener=own_file) as file:
                name = file.read()
        except OSError:
            return False
        return bool(_KERNEL.fullmatch(name)) and _is_locked(self.path.parent / name)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def check(self) -> None:
        """Raise an error if the folder was deleted; the error says why that may have happened."""
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"run {self.id} was deleted from disk, its logs and metrics with it: {self.path} "
                "is not there any more. What a live kernel holds is kept; beyond that, the newest "
                f"{_KEPT_RUNS} runs and at most {_KEPT_BYTES // 10**9} GB: to keep one, keep its "
                "handle or copy run.log_dir"
            )

    def make_logs(self, world_size: int) -> None:
        """Create an empty log file for each rank in this folder of a session."""
        with making_files(self.path), held():
            for rank in range(world_size):
                log_path(self.path, rank).touch(mode=0o600)

    def link_logs(self, session: RunFolder, world_size: int) -> None:
        """Link the log files of a session into this folder, which belongs to one of its calls."""
        for rank in range(world_size):
            source, target = log_path(session.path, rank), log_path(self.path, rank)
            try:
                target.hardlink_to(source)
            except OSError:  # a file system without hard links
                with making_files(self.path):
                    target.symlink_to(source)

    def read_log(self, rank: int, start: int = 0, end: int | None = None) -> str:
        """Return what a rank printed, as a terminal would show it; "" if there is no log file.

        Args:
            start, end: byte offsets in the log file between which to read; ``end=None`` stands for
                the end of the file.

        Raises:
            FileNotFoundError: the folder was deleted.
            OSError: the file cannot be read.
        """
        self.check()
        try:
            with open_to_read(self.path, rank) as file:
                file.seek(start)
                data = file.read(-1 if end is None else max(0, end - start))
        except FileNotFoundError:  # the rank was never started
            return ""
        text = data.decode(errors="replace")
        return "\n".join(as_shown(line) for line in text.split("\n"))

    def save(self, state: RunState, config: LaunchConfig | None = None) -> str:
        """Write the run's state, and its settings if given; a disk error is not raised.

        Returns:
            A message for the user if the files could not be written, else "".
        """
        path = self.path / (_STATE if state.has_ended else _BEGIN)
        part = path.with_suffix(".part")
        try:
            with self._saving:
                if config is not None:
                    with open(self.config_path, "w", encoding="utf-8", opener=own_file) as settings:
                        settings.write(_text_of(config))
                with open(part, "r+b" if part.exists() else "wb", opener=own_file) as file:
                    file.write(encode(state))
                    file.truncate()
                part.replace(path)
                if config is not None and state.detached and not state.has_ended:
                    # Take the room for the final state now: the disk may be full by then.
                    room = (self.path / _STATE).with_suffix(".part")
                    with contextlib.suppress(OSError), open(room, "wb", opener=own_file) as file:
                        os.posix_fallocate(file.fileno(), 0, _STATE_BYTES)
        except OSError as error:
            return lost_files_notice(
                "how this run ended is known to this kernel alone", self.path, error
            )
        return ""

    def load(self) -> RunState | None:
        """Return the final state, or else the first one; None if neither can be read.

        The field ``began`` of the state is None.
        """
        # For a damaged file msgspec lets other errors through beside its own.
        errors = (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
        for name in (_STATE, _BEGIN):
            with contextlib.suppress(*errors):
                with open(self.path / name, "rb", opener=own_file) as file:
                    state = msgspec.msgpack.decode(file.read(), type=RunState)
                # Another kernel wrote it, maybe on another machine: its monotonic clock means
                # nothing here.
                return replace(state, began=None)
        return None

    def save_rescued(self, size: int, rescued: Callable[[], Any]) -> str:
        """Save the training state of a stopped run, of ``size`` bytes; an error is not raised.

        Returns:
            A phrase for what could not be saved and why; "" if all was saved.
        """
        part = self._rescued_path.with_suffix(".part")
        try:
            if size > _RESCUED_BYTES:
                most = f"{_RESCUED_BYTES / 1e9:.0f} GB"
                return (
                    f"all of it ({size / 1e9:.1f} GB, of which a run's folder takes at most {most})"
                )
            with open(part, "w+b", opener=own_file) as file:
                rescued().write(file)
            part.replace(self._rescued_path)
        except Exception as error:  # what the user's classes raise, and torch on a full disk
            part.unlink(missing_ok=True)
            return f"all of it ({type(error).__name__}: {error})"
        return ""

    def load_rescued(self) -> Any:
        """Load the training state that :meth:`save_rescued` wrote; None if there is no such file.

        The training state is a ``Rescued`` with state dicts; the file has no model objects.
        """
        try:
            with open(self._rescued_path, "rb", opener=own_file) as file:
                module = import_module("notebook_accel.training.preparing.state_after_stop")
                return module.Rescued.read(file)
        except FileNotFoundError:
            return None
        except Exception as error:  # what torch raises for whatever bytes there are
            raise NotebookAccelError(f"{self._rescued_path} cannot be read: {error}") from error

    # ---- requests to the process that conducts the run, and its answers, each a file: "interrupt",
    # "kill", and "stop", which has the grace period in seconds if one was given. The keeper of a
    # detached run also takes "state" and "stacks-..." (launch/keeper.py).

    def leave(self, name: str, text: str = "") -> None:
        """Leave a request or an answer of this name, in place of one that was not taken yet.

        On a full disk it is left without its text: an empty file needs no room.
        """
        part = self.path / f".{name}-{secrets.token_hex(4)}.part"
        fd = own_file(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with contextlib.suppress(OSError):
            os.write(fd, text.encode())
        os.close(fd)
        part.replace(self.path / f".{name}")

    def left(self, prefix: str) -> list[str]:
        """Return the names with this prefix of what :meth:`leave` left and nobody has taken."""
        with contextlib.suppress(OSError):
            names = (entry.name[1:] for entry in os.scandir(self.path) if entry.name[0] == ".")
            return [name for name in names if name.startswith(prefix) and "." not in name]
        return []

    def has_left(self, name: str) -> bool:
        """Whether what :meth:`leave` left waits to be taken."""
        return (self.path / f".{name}").exists()

    def take(self, name: str) -> str | None:
        """Return what :meth:`leave` left and delete it; None if there is nothing."""
        path = self.path / f".{name}"
        try:
            with open(path, encoding="utf-8", opener=own_file) as file:
                text = file.read()
            path.unlink()
        except (OSError, UnicodeDecodeError):
            return None
        return text

    def last_change(self) -> float:
        """Return when a file of the folder last changed, as ``time.time()``; 0.0 if unknown."""
        with contextlib.suppress(OSError):
            return max((file.stat().st_mtime for file in self.path.iterdir()), default=0.0)
        return 0.0


def new_run_id() -> str:
    """Return a new run id, made from the time in UTC, so that sorting ids sorts by launch time."""
    # In UTC, which no summer time or journey sets back.
    now = dt.datetime.now(dt.timezone.utc)
    # Five of the six hexadecimal digits are the microsecond. The last is random: two kernels may
    # launch in the same microsecond.
    return f"{now:%Y%m%d-%H%M%S}-{now.microsecond:05x}{uuid.uuid4().hex[:1]}"


def run_folders(root: Path | None = None) -> list[RunFolder]:
    """Return the folders of this user's runs on disk, oldest first."""
    root = runs_folder() if root is None else root
    try:
        with open_folder(root) as opened:
            names = sorted(entry.name for entry in os.scandir(opened) if _is_own_run(entry))
    except PermissionError as error:
        raise LaunchError(
            f"the folder of runs, {root}, is not read: {error}. Set NOTEBOOK_ACCEL_RUNS to a "
            "folder of your own"
        ) from None
    except OSError:
        return []
    return [RunFolder(root / name) for name in names]


def _is_own_run(entry: os.DirEntry[str]) -> bool:
    """Return whether a directory entry is the folder of a run that this user owns."""
    with contextlib.suppress(OSError):  # another kernel has just removed it
        is_folder = _ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        return bool(is_folder) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    return False


@contextlib.contextmanager
def making_files(folder: Path) -> Iterator[None]:
    """Turn an ``OSError`` in the block into a ``LaunchError`` that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            raise too_many_files() from None
        raise LaunchError(
            f"the files for the run's logs and metrics cannot be made in {folder}: {error}. "
            f"{_REMEDY}"
        ) from None


def lost_files_notice(what: str, folder: Path, error: OSError | None) -> str:
    """Return a message for the user about lost files: what is lost, why, and what to do.

    Args:
        error: the error of writing a file; None if files were deleted.
    """
    if error is None or not folder.is_dir():
        return (
            f"files of this run were deleted while it went on ({folder}): logs and metrics are "
            "lost. Launch again to have them"
        )
    if error.errno in FULL_DISK:
        return f"disk full: {what} ({folder}). {_REMEDY}"
    return f"{what} ({folder}): {error}. {_REMEDY}"


# ---- who holds a run -----------------------------------------------------------------------

_kernel_locks: dict[tuple[Path, int], IO[bytes]] = {}
# Of two threads that launch at once each would make a file, and the one that is replaced would be
# closed, and with that no longer locked: its run would count as that of a dead kernel.
_kernel_locks_lock = threading.Lock()


def _kernel_file(root: Path) -> Path:
    """Return the path of this process's lock file in ``root``; the first call makes and locks it.

    The lock shows other kernels that this process is alive, and still uses its runs.
    """
    key = (root, os.getpid())
    with _kernel_locks_lock:
        lock = _kernel_locks.get(key)
        if lock is None or not os.path.exists(lock.name):
            path = root / f".kernel-{uuid.uuid4().hex[:12]}"
            # Whoever may read it may lock it, too, and keep the runs of a dead kernel for good.
            lock = open(path, "xb", opener=own_file)  # noqa: SIM115 (kept open)
            _kernel_locks[key] = lock
            atexit.register(_let_go, path, os.getpid())
            # On a file system without locks, to others a run lives as long as its mark is there.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Path(lock.name)


def _let_go(mark: Path, pid: int) -> None:
    # A child that was forked from this process has the same objects, and must not speak for it.
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            mark.unlink()


def _is_locked(path: Path) -> bool:
    """Return whether a live process has locked the lock file of some kernel.

    Also True if the lock cannot be tested, so that no run is removed while it is in use.
    """
    try:
        # NFS locks only what is open for writing.
        with open(path, "r+b", opener=own_file) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _size(folder: Path) -> int:
    with contextlib.suppress(OSError):
        entries = [entry.stat(follow_symlinks=False) for entry in os.scandir(folder)]
        # The calls of a session share its files of output: each counts for an equal part of them.
        return sum(entry.st_size // entry.st_nlink for entry in entries)
    return 0
