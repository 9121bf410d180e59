"""The folder of a run on disk: logs and metrics, append-only, and which old runs go."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import platformdirs

from notebook_accel.errors import LaunchError
from notebook_accel.launch.control.terminal_text import as_shown
from notebook_accel.launch.system.log_files import log_path

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MetricStore", "RunFolder", "runs_folder"]

_KEPT_RUNS = 20
_STRETCHES = 200
_LIVE = ".live"
_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")

_log = logging.getLogger(__name__)


def runs_folder() -> Path:
    """Where runs are kept: ``NOTEBOOK_ACCEL_RUNS``, or the platform's state folder."""
    chosen = os.environ.get("NOTEBOOK_ACCEL_RUNS")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(platformdirs.user_state_dir("notebook-accel")) / "runs"


class RunFolder:
    """The folder of one run. It is locked while the run lives, so that nobody removes it.

    Raises:
        LaunchError: it cannot be made.
    """

    def __init__(self, root: Path | None = None) -> None:
        root = runs_folder() if root is None else root
        self.id = time.strftime("%Y%m%d-%H%M%S-") + uuid.uuid4().hex[:6]
        self.path = root / self.id
        try:
            self.path.mkdir(parents=True, mode=0o700)
            self._lock: IO[bytes] | None = _lock(self.path)
        except OSError as error:
            raise LaunchError(
                f"the folder for the run's logs and metrics cannot be made in {root}: {error}. Set "
                "NOTEBOOK_ACCEL_RUNS to a folder that can be written"
            ) from None
        _remove_old(root, keep=self.path)

    def read_log(self, rank: int) -> str:
        """All that a rank printed, as a terminal would show it."""
        try:
            with log_path(self.path, rank).open(errors="replace", newline="\n") as file:
                text = file.read()
        except FileNotFoundError:
            return ""
        return "\n".join(as_shown(line) for line in text.split("\n"))

    def release(self) -> None:
        """The run has ended: its folder may be removed when newer ones came."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()
            with contextlib.suppress(OSError):
                (self.path / _LIVE).unlink()


def _lock(folder: Path) -> IO[bytes]:
    handle = (folder / _LIVE).open("wb")
    # A file system without locks: to others the run lives as long as the mark is there.
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _remove_old(root: Path, *, keep: Path) -> None:
    """Remove all but the newest runs; folders that were not made by us are left alone."""
    folders = sorted(
        entry for entry in root.iterdir() if _ID.fullmatch(entry.name) and entry != keep
    )
    for folder in folders[: max(0, len(folders) - _KEPT_RUNS + 1)]:
        if not _is_live(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_live(folder: Path) -> bool:
    try:
        with (folder / _LIVE).open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class MetricStore:
    """Metrics in a file of JSON lines: time, rank, step, name, value.

    A disk that is full costs the metrics from then on, never the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
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
            _log.warning("metrics are lost from here on: %s: %s", self.path, error)
            with contextlib.suppress(OSError):
                self._file.close()

    def read(self) -> list[dict[str, Any]]:
        """Every row, in the order in which they came; none where the folder is gone."""
        self.flush()
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            return [_decode(line) for line in file if line.endswith(b"\n")]
        return []

    def sample(self, max_bytes: int) -> list[dict[str, Any]]:
        """Every row of a short file; of a long one, stretches from its begin to its end."""
        self.flush()
        with contextlib.suppress(FileNotFoundError):
            size = self.path.stat().st_size
            if size > max_bytes:
                with self.path.open("rb") as file:
                    return [_decode(line) for line in _spread_lines(file, size, max_bytes)]
        return self.read()


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


def _encode(row: dict[str, Any]) -> bytes:
    # JSON has no nan and no infinity; they travel as text.
    value = row["value"]
    is_finite = value - value == 0
    return msgspec.json.encode(row if is_finite else {**row, "value": repr(value)})


def _decode(line: bytes) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.json.decode(line)
    if isinstance(row["value"], str):
        row["value"] = float(row["value"])
    return row
