"""Every error that notebook_accel raises on purpose.

NotebookAccelError(RuntimeError)
├── LaunchError          the run could not start
├── WorkerError          a rank failed
├── RunStopped           the run was stopped before it had a result
└── ConfigError(ValueError)   a setting that makes no sense, alone or with another
"""

from __future__ import annotations

import traceback
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ConfigError", "LaunchError", "NotebookAccelError", "RunStopped", "WorkerError"]


# Packages between a cell and the magic that it calls.
_SHELL = {"IPython", "decorator", "decorator.py"}


class _Run(Protocol):
    """What an error needs to know of ``launch.run.Run``, which is built on this module."""

    @property
    def id(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def results(self) -> list[Any]: ...
    @property
    def metrics(self) -> list[dict[str, Any]]: ...
    @property
    def log_dir(self) -> Path: ...
    def logs(self, rank: int | None = None) -> str: ...
    def show(self) -> None: ...


class NotebookAccelError(RuntimeError):
    """Base class of all errors that this package raises.

    Attributes:
        run: the run that the error belongs to, or None. Its logs, its metrics and the results of
            ranks that ended are still there.

    Example:
        >>> from notebook_accel import LaunchConfig, NotebookAccelError
        >>> try:
        ...     LaunchConfig(num_processes=0)
        ... except NotebookAccelError as error:
        ...     print(type(error).__name__, error.run)
        ConfigError None
    """

    run: _Run | None = None
    # What else can be done, said below the message where a notebook shows it.
    hint: str = ""
    # What a person calls each file of the notebook's cells; set where the error is shown.
    cell_names: Mapping[str, str] = MappingProxyType({})

    def __getstate__(self) -> dict[str, Any]:
        # A handle holds threads and sockets: it stays in the process that made it.
        return {name: value for name, value in self.__dict__.items() if name != "run"}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args), self.__getstate__())

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of this error: no frame of ours, and the message whole."""
        frames = list(takewhile(_is_outer, traceback.extract_tb(self.__traceback__)))
        frames = [frame for frame in frames if not _SHELL & set(Path(frame.filename).parts)]
        # One frame is the cell itself, right above.
        where = "".join(traceback.format_list(frames) if len(frames) > 1 else [])
        for filename, label in self.cell_names.items():
            where = where.replace(f'File "{filename}"', label)
        hint = f"\n{self.hint}" if self.hint else ""
        return [where, f"\x1b[0;31m{type(self).__name__}\x1b[0m: {self._shown_message()}{hint}"]

    def _shown_message(self) -> str:
        """The message as a notebook shows it."""
        return str(self)


def _is_outer(frame: traceback.FrameSummary) -> bool:
    return Path(__file__).parent not in Path(frame.filename).parents


def _rebuild(kind: type[NotebookAccelError], args: tuple[Any, ...]) -> NotebookAccelError:
    return kind.__new__(kind, *args)


class LaunchError(NotebookAccelError):
    """A run could not start; the message names the failed check and what to do.

    Example:
        >>> from notebook_accel import LaunchError, NotebookAccelError
        >>> issubclass(LaunchError, NotebookAccelError)
        True
    """


class ConfigError(NotebookAccelError, ValueError):
    """A setting is invalid, alone or together with another; it is a ``ValueError`` too.

    Example:
        >>> from notebook_accel import LaunchConfig
        >>> LaunchConfig(mixed_precision="fp4")
        Traceback (most recent call last):
            ...
        ConfigError
    """


class RunStopped(NotebookAccelError):
    """A run was stopped before it had a result.

    ``error.run`` is the run, and ``error.run.rescued`` what it was training.

    Example:
        >>> import time
        >>> from notebook_accel import RunStopped, notebook_launcher
        >>> run = notebook_launcher(time.sleep, (600,), num_processes=2, block=False)
        >>> run.kill()
        >>> try:
        ...     run.wait()
        ... except RunStopped as error:
        ...     stopped = error
        >>> stopped.run.status
        'stopped'
    """


class WorkerError(NotebookAccelError):
    """A rank failed; the message has its traceback.

    Attributes:
        rank: the rank whose failure is the cause; None if the agent itself died.
        ranks: all ranks that failed, without those that only lost a peer.
        traceback: traceback of the failed rank as text; "" if it died without one.
        exitcode: exit code of the rank's process, or the one that it would have where the process
            stays (a session); None if a signal ended it.
        signal: name of the signal that ended it, such as "SIGKILL"; None if none did.
        run: the run.

    Example:
        >>> from notebook_accel import WorkerError, notebook_launcher
        >>> def train():
        ...     return 1 / 0
        >>> try:
        ...     run = notebook_launcher(train, num_processes=2)
        ... except WorkerError as error:
        ...     failure = error
        >>> failure.ranks, type(failure.__cause__).__name__
        ([0, 1], 'ZeroDivisionError')
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        ranks: Sequence[int] = (),
        traceback: str = "",
        exitcode: int | None = None,
        signal: str | None = None,
    ) -> None:
        """Keep what is known of the failure.

        Args:
            message: text of the error.
            rank: as the attribute.
            ranks: as the attribute.
            traceback: as the attribute.
            exitcode: as the attribute.
            signal: as the attribute.
        """
        super().__init__(message)
        self.rank = rank
        self.ranks = list(ranks)
        self.traceback = traceback
        self.exitcode = exitcode
        self.signal = signal

    def _shown_message(self) -> str:
        """The message, with the rank's error named once: below its traceback, as Python has it."""
        head, _, rest = str(self).partition("\n")
        who, _, said = head.partition(" failed: ")
        is_below = said and any(line.endswith(said) for line in self.traceback.splitlines())
        return f"{who} failed:\n{rest}" if is_below else str(self)
