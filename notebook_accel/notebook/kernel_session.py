"""The one session of this kernel: started at its first use, found, and ended."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from notebook_accel.errors import ConfigError
from notebook_accel.notebook.session import NotebookSession, num_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from notebook_accel.config import LaunchConfig

__all__ = ["current_session", "end_session", "session_for", "start_session"]

_OPTIONS = {"num_processes": "-n", "mixed_precision": "--mixed-precision"}

_session: NotebookSession | None = None


def current_session() -> NotebookSession | None:
    """The session of this kernel; None where there is none, or where the person ended it.

    One whose ranks have all died is still the session: a new one in its place would have none of
    its names, and perhaps another number of ranks, and nobody would have been told.
    """
    return _session


def start_session(
    shell: InteractiveShell, config: LaunchConfig, notices: Sequence[str] = ()
) -> NotebookSession:
    """Start the session.

    Args:
        shell: of the notebook.
        config: how to launch.
        notices: lines for the person, shown with the first call.

    Raises:
        ConfigError: there is one, or it cannot be started so.
        LaunchError: the ranks could not be started.
    """
    global _session
    running = current_session()
    if running is not None:
        raise ConfigError(
            f"there is a session of {num_ranks(running.world_size)}: `%accelerate restart` starts "
            "another one in its place"
        )
    _session = NotebookSession(shell, config, notices)
    return _session


def session_for(
    shell: InteractiveShell, config: LaunchConfig, notices: Sequence[str] = ()
) -> NotebookSession:
    """The session, started if there is none; the arguments are those of :func:`start_session`.

    Raises:
        ConfigError: it was started otherwise, or cannot be started so.
        LaunchError: the ranks could not be started.
    """
    running = current_session()
    if running is None:
        return start_session(shell, config, notices)
    _check_same(running, config)
    return running


def _check_same(running: NotebookSession, config: LaunchConfig) -> None:
    """Refuse what the session cannot become without new ranks.

    Raises:
        ConfigError: a setting that is not its default differs.
    """
    has = replace(running.config, num_processes=running.world_size)
    other = [
        setting.name
        for setting in fields(config)
        if getattr(config, setting.name) not in (setting.default, getattr(has, setting.name))
    ]
    if not other:
        return
    options = [f"{_OPTIONS[name]} {getattr(config, name)}" for name in other if name in _OPTIONS]
    command = " ".join(["%accelerate restart", *options])
    if len(options) < len(other):
        command = "%accelerate stop"
    held = ", ".join(f"{name}={getattr(has, name)!r}" for name in other)
    raise ConfigError(
        f"the session was started with {held}: `{command}` ends it, with all its names, for one "
        "with other settings; `%%accelerate --fresh` runs a cell in workers of its own"
    )


def end_session() -> bool:
    """End the session; False where there is none."""
    global _session
    ending, _session = _session, None
    if ending is None:
        return False
    ending.end()
    return True
