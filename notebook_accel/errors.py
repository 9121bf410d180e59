"""The errors of notebook_accel that users may want to catch.

NotebookAccelError(RuntimeError)
├── LaunchError          the run could not start
├── WorkerError          a rank (one of the run's processes) failed
├── RunStopped           the run was stopped before it had a result
└── ConfigError(ValueError)   a setting is invalid, alone or together with another
"""

from __future__ import annotations

import copyreg
import traceback
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

# Packages between a cell and the magic that it calls.
_SHELL = {"IPython", "decorator", "decorator.py"}


class NotebookAccelError(RuntimeError):
    """Base class of the errors of notebook_accel that users may want to catch.

    Attributes:
        run: handle of the run that failed or was stopped. Its logs, its metrics and the results of
            ranks that had ended can still be read. None if no run was involved, as for an invalid
            setting, or if the error was unpickled.

    Example:
        >>> from notebook_accel import LaunchConfig, NotebookAccelError
        >>> try:
        ...     LaunchConfig(num_processes=0)
        ... except NotebookAccelError as error:
        ...     print(type(error).__name__, error.run)
        ConfigError None
    """

    run: Any = None  # a launch.run.Run, which imports this module
    # What else can be done, said below the message where a notebook shows it.
    hint: str = ""
    # What a person calls each file of the notebook's cells; set where the error is shown.
    cell_names: Mapping[str, str] = MappingProxyType({})

    def __getstate__(self) -> dict[str, Any]:
        # A handle holds threads and sockets: it stays in the process that made it.
        return {name: value for name, value in self.__dict__.items() if name != "run"}

    def __reduce__(self) -> tuple[Any, ...]:
        # Without ``__init__``, whose parameters are others than ``args``.
        return copyreg.__newobj__, (type(self), *self.args), self.__getstate__()  # type: ignore[attr-defined]

    def _render_traceback_(self) -> list[str]:
        """IPython calls this: a traceback up to this package's call, then the message."""
        own = Path(__file__).parent
        found = traceback.extract_tb(self.__traceback__)
        frames = list(takewhile(lambda frame: own not in Path(frame.filename).parents, found))
        frames = [frame for frame in frames if not _SHELL & set(Path(frame.filename).parts)]
        # One frame is the cell itself, right above.
        where = "".join(traceback.format_list(frames) if len(frames) > 1 else [])
        for filename, label in self.cell_names.items():
            where = where.replace(f'File "{filename}"', label)
        hint = f"\n{self.hint}" if self.hint else ""
        return [where, f"\x1b[0;31m{type(self).__name__}\x1b[0m: {self._shown_message()}{hint}"]

    def _shown_message(self) -> str:
        return str(self)


class LaunchError(NotebookAccelError):
    """A run could not start; the message names the failed check and what to do.

    Example:
        >>> from notebook_accel import LaunchError, NotebookAccelError
        >>> issubclass(LaunchError, NotebookAccelError)
        True
    """


class ConfigError(NotebookAccelError, ValueError):
    """A setting is invalid, alone or together with another; the error is also a ``ValueError``.

    Example:
        >>> from notebook_accel import LaunchConfig
        >>> LaunchConfig(mixed_precision="fp4")
        Traceback (most recent call last):
            ...
        ConfigError
    """


class RunStopped(NotebookAccelError):
    """A run was stopped before it had a result.

    ``error.run`` is the handle of the run. ``error.run.rescued`` holds the models, optimizer states
    and step count from the moment of the stop, or None if nothing could be rescued.

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
    """A rank (one of the run's processes) failed; the message contains its traceback.

    Attributes:
        rank: the rank whose failure caused the others; None if the agent, the process that starts
            and watches the ranks, died itself.
        ranks: the ranks that failed by themselves. Ranks that failed only because they lost the
            connection to another rank are left out.
        traceback: traceback of the failed rank as text; "" if the rank died without one.
        exitcode: exit code of the rank's process; None if a signal ended it. In a session the
            process survives, and this is the exit code that the failure would otherwise have
            caused.
        signal: name of the signal that ended the process, such as "SIGKILL"; None if no signal did.
        run: handle of the run.

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
        """Store the facts about the failure in the attributes of the same names.

        Args:
            message: text of the error.
            rank: see the attribute.
            ranks: see the attribute.
            traceback: see the attribute.
            exitcode: see the attribute.
            signal: see the attribute.
        """
        super().__init__(message)
        self.rank = rank
        self.ranks = list(ranks)
        self.traceback = traceback
        self.exitcode = exitcode
        self.signal = signal

    def _shown_message(self) -> str:
        """Cut the rank's exception from the first line, where the traceback below shows it."""
        head, _, rest = str(self).partition("\n")
        who, _, said = head.partition(" failed: ")
        is_below = said and any(line.endswith(said) for line in self.traceback.splitlines())
        return f"{who} failed:\n{rest}" if is_below else str(self)
