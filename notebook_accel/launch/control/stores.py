"""The folder of a run on disk: logs, metrics and the last state; and which old runs go.

    runs folder/
      .kernel-3f2a…            locked by a kernel as long as it lives: one descriptor a kernel
      20260131-120000-1a2b3c/  one run, readable by its owner alone
        .live                  names the kernel that holds the run
        rank-0.log, …          and metrics.jsonl, config.yaml, state.msgpack

What a live kernel holds is never deleted. Of the others the newest 50 stay, 2 GB at most.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import time
import uuid
import weakref
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypedDict

import msgspec
import platformdirs

from notebook_accel.errors import LaunchError
from notebook_accel.launch.control.interrupts import held
from notebook_accel.launch.control.state import RunState
from notebook_accel.launch.control.terminal_text import as_shown
from notebook_accel.launch.system.log_files import log_path
from notebook_accel.launch.system.open_files import TOO_MANY_FILES, too_many_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from notebook_accel.config import LaunchConfig

__all__ = ["MetricReader", "MetricStore", "RunFolder", "run_folders", "runs_folder"]

_KEPT_RUNS = 50
_KEPT_BYTES = 2_000_000_000
_STRETCHES = 200
_LIVE = ".live"
_STATE = "state.msgpack"
_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_KERNEL = re.compile(r"\.kernel-[0-9a-f]{12}")
# A file of others may be a FIFO, whose opening waits for a writer.
_CAREFULLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

_log = logging.getLogger(__name__)


def runs_folder() -> Path:
    """Where runs are kept: ``NOTEBOOK_ACCEL_RUNS``, or the platform's state folder.

    Raises:
        LaunchError: this user has no home folder, and no other was named.
    """
    chosen = os.environ.get("NOTEBOOK_ACCEL_RUNS")
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        folder = Path(platformdirs.user_state_dir("notebook-accel")) / "runs"
        if folder.is_absolute():
            return folder
    except RuntimeError:  # as older versions of platformdirs do not raise
        pass
    raise LaunchError(
        "this user has no home folder, where the logs and metrics of runs are kept: set HOME, or "
        "NOTEBOOK_ACCEL_RUNS to a folder that can be written"
    )


class RunFolder:
    """The folder of one run.

    As long as this object lives in the kernel that made the folder, nobody removes it.
    """

    def __init__(self, path: Path) -> None:
        self.id = path.name
        self.path = path

    @classmethod
    def make(cls, root: Path | None = None, *, remove_old: bool = True) -> RunFolder:
        """Make the folder of a new run, and remove old ones.

        Args:
            root: of all runs; None for the usual.
            remove_old: look for old ones at all, which takes 20 ms with fifty of them.

        Raises:
            LaunchError: it cannot be made.
        """
        root = runs_folder() if root is None else root
        folder = cls(root / (time.strftime("%Y%m%d-%H%M%S-") + uuid.uuid4().hex[:6]))
        try:
            folder.path.mkdir(parents=True, mode=0o700)
            folder._hold()
        except OSError as error:
            folder.remove()  # it may be there, without what says that we hold it
            if error.errno in TOO_MANY_FILES:
                raise too_many_files() from None
            raise LaunchError(
                f"the folder for the run's logs and metrics cannot be made in {root}: {error}. Set "
                "NOTEBOOK_ACCEL_RUNS to a folder that can be written"
            ) from None
        if remove_old:
            _remove_old(root, beside=folder)
        return folder

    def _hold(self) -> None:
        mark = self.path / _LIVE
        mark.write_text(_kernel_name(self.path.parent))
        weakref.finalize(self, _let_go, mark, os.getpid())

    @property
    def is_held(self) -> bool:
        """Whether a live kernel holds the run."""
        return _is_held(self.path)

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def check(self) -> None:
        """Refuse to read what is no longer there.

        Raises:
            FileNotFoundError: the folder was deleted.
        """
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"run {self.id} was deleted from disk, its logs and metrics with it: {self.path} "
                "is not there any more. What a live kernel holds is kept; beyond that, the newest "
                f"{_KEPT_RUNS} runs and at most {_KEPT_BYTES // 10**9} GB"
            )

    def make_logs(self, world_size: int) -> None:
        """Make the empty files for the output of ranks, so that they can be linked.

        Raises:
            LaunchError: they cannot be made.
        """
        with _making(self.path), held():
            for rank in range(world_size):
                log_path(self.path, rank).touch(mode=0o600)

    def link_logs(self, session: RunFolder, world_size: int) -> None:
        """Have the files of output of a session's ranks here too: its calls print into them.

        Raises:
            LaunchError: they cannot be linked.
        """
        for rank in range(world_size):
            source, target = log_path(session.path, rank), log_path(self.path, rank)
            try:
                target.hardlink_to(source)
            except OSError:  # a file system without them
                with _making(self.path):
                    target.symlink_to(source)

    def read_log(self, rank: int, start: int = 0, end: int | None = None) -> str:
        """What a rank printed, as a terminal would show it.

        Args:
            rank: of the run.
            start, end: bytes of the file between which it lies; all of it where none are given.

        Raises:
            FileNotFoundError: the folder was deleted.
            OSError: the file cannot be read, or is none.
        """
        self.check()
        try:
            # A link is a log too, of a session on a file system without hard ones.
            with _open_carefully(log_path(self.path, rank), follow=True) as file:
                file.seek(start)
                data = file.read(-1 if end is None else max(0, end - start))
        except FileNotFoundError:  # the rank was never started
            return ""
        text = data.decode(errors="replace")
        return "\n".join(as_shown(line) for line in text.split("\n"))

    def save(self, state: RunState, config: LaunchConfig | None = None) -> str:
        """Write what other processes can know; a full disk costs them that, never us the run.

        Args:
            state: the newest.
            config: how the run was launched; its variables, which may be secrets, are left out.

        Returns:
            A line for the person where it could not be written, else "".
        """
        path = self.path / _STATE
        part = path.with_suffix(".part")
        try:
            if config is not None:
                replace(config, env=None).save(self.config_path)
            part.write_bytes(msgspec.msgpack.encode(state))
            part.replace(path)
        except (OSError, UnicodeEncodeError) as error:
            return _loss("how this run ended is known to this kernel alone", self.path, error)
        return ""

    def load(self) -> RunState | None:
        """The state saved last; None where there is none that this version can read."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.msgpack.decode(_read(self.path / _STATE), type=RunState)
        return None

    @property
    def config_path(self) -> Path:
        """The YAML file that says how the run was launched."""
        return self.path / "config.yaml"

    def last_change(self) -> float:
        """When something was written here last, wall time in seconds."""
        with contextlib.suppress(OSError):
            entries = os.scandir(self.path)
            return max(entry.stat(follow_symlinks=False).st_mtime for entry in entries)
        return 0.0


def run_folders(root: Path | None = None) -> list[RunFolder]:
    """The folders of this user's runs on disk, oldest first; what we did not make is left out."""
    root = runs_folder() if root is None else root
    with contextlib.suppress(OSError):
        names = sorted(
            entry.name
            for entry in os.scandir(root)
            if _ID.fullmatch(entry.name)
            and entry.is_dir(follow_symlinks=False)
            # What others put into a shared folder, they may change while we read it.
            and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        )
        return [RunFolder(root / name) for name in names]
    return []


@contextlib.contextmanager
def _making(folder: Path) -> Iterator[None]:
    """Whoever cannot make a file in the folder of a new run says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            raise too_many_files() from None
        raise LaunchError(
            f"the files for the run's logs and metrics cannot be made in {folder}: "
            f"{error.strerror}. {_REMEDY}"
        ) from None


_REMEDY = (
    "Make room on its disk, or set NOTEBOOK_ACCEL_RUNS to a folder on another one that can be "
    "written"
)


def _loss(what: str, folder: Path, error: OSError | UnicodeEncodeError | None) -> str:
    """A line for the person: what is lost, why, and what to do.

    Args:
        what: is lost.
        folder: of the run.
        error: why; None where it was deleted.
    """
    if error is None or not folder.is_dir():
        return (
            f"files of this run were deleted while it went on ({folder}): logs and metrics are "
            "lost. Launch again to have them"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"disk full: {what} ({folder}). {_REMEDY}"
    return f"{what} ({folder}): {error}. {_REMEDY}"


# ---- who holds a run -----------------------------------------------------------------------

_kernel_locks: dict[tuple[Path, int], IO[bytes]] = {}


def _kernel_name(root: Path) -> str:
    """Name of the file in ``root`` that this process keeps locked; made at the first call."""
    key = (root, os.getpid())
    held = _kernel_locks.get(key)
    if held is None or not _is_same(held, Path(held.name)):
        held = _kernel_locks[key] = _locked_file(root)
        atexit.register(_let_go, Path(held.name), os.getpid())
    return Path(held.name).name


def _locked_file(root: Path) -> IO[bytes]:
    while True:
        path = root / f".kernel-{uuid.uuid4().hex[:12]}"
        file = path.open("xb")
        # A file system without locks: to others a run lives as long as its mark is there.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between the two lines somebody may have found it without a lock, and removed it.
        if _is_same(file, path):
            return file
        file.close()


def _is_same(file: IO[bytes], path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _let_go(mark: Path, pid: int) -> None:
    # A child that was forked from this process has the same objects, and must not speak for it.
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            mark.unlink()


def _is_held(folder: Path) -> bool:
    try:
        name = _read(folder / _LIVE).decode(errors="replace")
    except FileNotFoundError:
        return False
    except OSError:  # of another user, or no file at all: not ours to judge
        return True
    return bool(_KERNEL.fullmatch(name)) and _is_locked(folder.parent / name)


def _is_locked(path: Path) -> bool:
    """Whether a kernel lives that holds this file; removes the file where none does."""
    try:
        with _open_carefully(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _open_carefully(path: Path, *, follow: bool = False) -> IO[bytes]:
    """Open a regular file that others may have put there.

    Args:
        path: where it is.
        follow: whether it may be a link.

    Raises:
        OSError: it is no regular file, or cannot be read.
    """

    def opener(name: str, _: int) -> int:
        return os.open(name, _CAREFULLY if follow else _CAREFULLY | os.O_NOFOLLOW)

    # Interrupted before the file has its descriptor, that would stay open for good.
    with held():
        file = open(path, "rb", opener=opener)  # noqa: SIM115 (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is no regular file")
    return file


def _read(path: Path) -> bytes:
    with _open_carefully(path) as file:
        return file.read()


def _remove_old(root: Path, *, beside: RunFolder) -> None:
    """Remove runs that nobody holds, beyond the newest; what we did not make is left alone."""
    for entry in os.listdir(root):
        if _KERNEL.fullmatch(entry):
            _is_locked(root / entry)
    kept, num_bytes = 1, 0  # the new run will be among those that stay
    for folder in reversed(run_folders(root)):
        if folder.id == beside.id or folder.is_held:
            continue
        kept, num_bytes = kept + 1, num_bytes + _size(folder.path)
        if kept > _KEPT_RUNS or num_bytes > _KEPT_BYTES:
            folder.remove()


def _size(folder: Path) -> int:
    with contextlib.suppress(OSError):
        entries = [entry.stat(follow_symlinks=False) for entry in os.scandir(folder)]
        # The calls of a session share its files of output.
        return sum(entry.st_size // entry.st_nlink for entry in entries)
    return 0


# ---- metrics -------------------------------------------------------------------------------


class MetricReader:
    """Metrics in a file of JSON lines: time, rank, step, name, value."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self._num_bad = 0

    def read(self) -> list[dict[str, Any]]:
        """Every row, in the order in which they came; none where there is no file.

        What is no row is left out, with a line in Python's log that counts it.

        Raises:
            OSError: the file cannot be read, or is none.
        """
        with contextlib.suppress(FileNotFoundError), _open_carefully(self.path) as file:
            return self._rows(line for line in file if line.endswith(b"\n"))
        return []

    def _rows(self, lines: Iterable[bytes]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        num_bad = 0
        for line in lines:
            try:
                rows.append(_decode(line))
            except (ValueError, RecursionError):
                num_bad += 1
        if num_bad > self._num_bad:
            self._num_bad = num_bad
            _log.warning("%d lines that are no metrics were left out: %s", num_bad, self.path)
        return rows

    def sample(self, max_bytes: int) -> list[dict[str, Any]]:
        """Every row of a short file; of a long one, stretches from its begin to its end."""
        with contextlib.suppress(FileNotFoundError):
            size = self.path.stat().st_size
            if size > max_bytes:
                with _open_carefully(self.path) as file:
                    return self._rows(_spread_lines(file, size, max_bytes))
        return self.read()


class MetricStore(MetricReader):
    """The metrics of a run that goes on.

    A disk that is full costs the metrics from then on, never the run.

    Attributes:
        loss: a line for the person where metrics are lost, else "".
    """

    def __init__(self, folder: Path) -> None:
        """Make the file.

        Raises:
            LaunchError: it cannot be made.
        """
        super().__init__(folder)
        self.loss = ""
        with _making(folder):
            self._file = self.path.open("ab")

    def add(self, *, wall: float, rank: int, step: int | None, values: dict[str, float]) -> None:
        """Append values; readers see them after :meth:`flush`."""
        with self._writing():
            for name, value in values.items():
                row = {"time": wall, "rank": rank, "step": step, "name": name, "value": value}
                self._file.write(_encode(row) + b"\n")

    def flush(self) -> None:
        with self._writing():
            self._file.flush()
            if not self.loss and os.fstat(self._file.fileno()).st_nlink == 0:
                self.loss = _loss("metrics are lost", self.path.parent, None)

    def close(self) -> None:
        with self._writing():
            self._file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except ValueError:  # closed meanwhile, by the run's end or by a full disk
            return
        except OSError as error:
            self.loss = _loss("metrics are lost from here on", self.path.parent, error)
            with contextlib.suppress(OSError):
                self._file.close()

    def read(self) -> list[dict[str, Any]]:
        self.flush()
        return super().read()

    def sample(self, max_bytes: int) -> list[dict[str, Any]]:
        self.flush()
        return super().sample(max_bytes)


def _spread_lines(file: IO[bytes], size: int, max_bytes: int) -> Iterator[bytes]:
    length = max_bytes // _STRETCHES
    for number in range(_STRETCHES):
        start = (size - length) * number // (_STRETCHES - 1)
        file.seek(start)
        if start:
            file.readline()  # the rest of a row that began before
        while file.tell() < start + length:
            line = file.readline()
            if not line.endswith(b"\n"):
                return
            yield line


class _Row(TypedDict):
    time: float
    rank: int
    step: int | None
    name: str
    value: float | str


_DECODER = msgspec.json.Decoder(_Row)


def _encode(row: dict[str, Any]) -> bytes:
    # JSON has no nan and no infinity; they travel as text.
    value = row["value"]
    is_finite = value - value == 0
    return msgspec.json.encode(row if is_finite else {**row, "value": repr(value)})


def _decode(line: bytes) -> dict[str, Any]:
    """The row of one line.

    Raises:
        ValueError: the line is none.
    """
    row: dict[str, Any] = _DECODER.decode(line)  # type: ignore[assignment]
    if isinstance(row["value"], str):
        row["value"] = float(row["value"])
    return row
