"""The file with the metrics of a run: written while the run goes on, read completely or in samples.

Each ``accelerator.log`` in a rank becomes a message ``wire.Metric``. In the kernel the run appends
the values in the message to a :class:`MetricStore`; ``run.metrics`` and the plots read them with a
:class:`MetricReader`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypedDict

import msgspec

from notebook_accel import wire
from notebook_accel.config.file import not_too_large
from notebook_accel.launch.control.run_folder import lost_files_notice, making_files
from notebook_accel.system.own_files import own_file

# A sample of a long file is made of so many stretches, from all over it.
_STRETCHES = 200
# No row is as long: what is read of a damaged file for a sample stays small.
_LONGEST_ROW = 65_536
# What a kernel that attaches to a run reads of its metrics, for the curves of the panel.
_TAIL_BYTES = 8_000_000


class MetricReader:
    """Reads the metrics of a run from ``metrics.jsonl``.

    Each line of the file is one logged value, and becomes one row: a dict with the keys ``time``,
    ``rank``, ``step``, ``name`` and ``value``.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self._start: int | None = None  # of what is new

    def flush(self) -> None:
        """Write buffered values to the file; only :class:`MetricStore` has any."""

    def read(self) -> list[dict[str, Any]]:
        """Return all rows, in the order in which they were written; [] if there is no file.

        Lines that are no valid row, as on a damaged disk, are skipped.

        Raises:
            OSError: the file cannot be read, or is too large.
        """
        self.flush()
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb", opener=own_file) as file:
            return _rows(line for line in not_too_large(file) if line.endswith(b"\n"))
        return []

    def sample(self, max_bytes: int = 8_000_000) -> list[dict[str, Any]]:
        """Return all rows or, if the file is large, only a sample of them, for a plot.

        Args:
            max_bytes: of a larger file, only about this many bytes are read: 200 pieces, spread
                evenly from its beginning to its end.

        Raises:
            OSError: the file cannot be read.
        """
        self.flush()
        with contextlib.suppress(FileNotFoundError):
            size = self.path.stat().st_size
            if size > max_bytes:
                with open(self.path, "rb", opener=own_file) as file:
                    return _rows(_spread_lines(file, size, max_bytes))
        return self.read()

    def read_new(self) -> list[dict[str, Any]]:
        """Return the rows that another process has added since the previous call.

        The first call returns the rows in the last 8 MB of the file. [] if it cannot be read.
        """
        with contextlib.suppress(OSError), open(self.path, "rb", opener=own_file) as file:
            if self._start is None:
                self._start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
                file.seek(self._start)
                self._start += len(file.readline()) if self._start else 0
            file.seek(self._start)
            data = file.read()
            size = data.rfind(b"\n") + 1
            self._start += size
            return _rows(data[:size].splitlines(keepends=True))
        return []


class MetricStore(MetricReader):
    """Writes the metrics of a running run, in the process that conducts the run.

    If the disk is full, all later metrics are lost, but the run goes on: writing raises nothing.

    Attributes:
        lost_notice: a message for the user if metrics are lost, else "".
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.lost_notice = ""
        with making_files(folder):
            self._file = open(self.path, "ab", opener=own_file)  # noqa: SIM115 (kept open)

    def add(self, metrics: Sequence[wire.Metric]) -> None:
        rows = [
            {
                "time": metric.wall,
                "rank": metric.rank,
                "step": metric.step,
                "name": name,
                # JSON has no nan and no infinity; they travel as text.
                "value": value if math.isfinite(value) else repr(value),
            }
            for metric in metrics
            for name, value in metric.values.items()
        ]
        with self._writing():
            # One call for all: thousands a second may come.
            self._file.write(_ENCODER.encode_lines(rows))

    def flush(self) -> None:
        with self._writing():
            self._file.flush()
            if not self.lost_notice and os.fstat(self._file.fileno()).st_nlink == 0:
                self.lost_notice = lost_files_notice("metrics are lost", self.path.parent, None)

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
            self.lost_notice = lost_files_notice(
                "metrics are lost from here on", self.path.parent, error
            )
            with contextlib.suppress(OSError):
                self._file.close()


def _spread_lines(file: IO[bytes], size: int, max_bytes: int) -> Iterator[bytes]:
    length = max_bytes // _STRETCHES
    for number in range(_STRETCHES):
        start = (size - length) * number // (_STRETCHES - 1)
        file.seek(start)
        if start:
            file.readline(_LONGEST_ROW)  # the rest of a row that began before
        while file.tell() < start + length:
            line = file.readline(_LONGEST_ROW)
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
_ENCODER = msgspec.json.Encoder()


def _rows(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the rows in these lines; lines that are no valid row are skipped."""
    rows: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row: dict[str, Any] = _DECODER.decode(line)  # type: ignore[assignment]
            if isinstance(row["value"], str):  # "nan" and "inf" become floats again
                row["value"] = float(row["value"])
            rows.append(row)
    return rows
