"""The one session of this kernel: started at its first use, found, and ended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from notebook_accel.config import LaunchConfig, given_settings, resolve
from notebook_accel.errors import ConfigError
from notebook_accel.launch.launcher import check_ranks
from notebook_accel.notebook.session import NotebookSession, num_ranks

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["current_session", "end_session", "restart_session", "session_for", "start_session"]

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


def restart_session(
    shell: InteractiveShell, config: LaunchConfig, notices: Sequence[str] = ()
) -> NotebookSession:
    """Start a session in the place of the one there is; the arguments are as of a start.

    Raises:
        ConfigError: it cannot be started so; where that can be known before, the old one goes on.
        LaunchError: the ranks could not be started.
    """
    check_ranks(config)
    end_session()
    return start_session(shell, config, notices)


def session_for(
    shell: InteractiveShell,
    arguments: Mapping[str, Any],
    config: LaunchConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> NotebookSession:
    """The session, started if there is none.

    Args:
        shell: of the notebook.
        arguments, config: as those of ``config.resolve``. A session that there is must have what
            they give; what files and the environment say is for one that starts.

    Raises:
        ConfigError: it was started otherwise, or cannot be started so.
        LaunchError: the ranks could not be started.
    """
    running = current_session()
    if running is None:
        return start_session(shell, *resolve(arguments, config))
    _check_same(running, given_settings(arguments, config))
    return running


def _check_same(running: NotebookSession, given: Mapping[str, Any]) -> None:
    """Refuse what the session cannot become without new ranks.

    Raises:
        ConfigError: a setting that is given differs.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return
    has = replace(running.config, num_processes=running.world_size)
    wanted = LaunchConfig(**given)
    other = [name for name in given if getattr(wanted, name) != getattr(has, name)]
    if not other:
        return
    options = [f"{_OPTIONS[name]} {getattr(wanted, name)}" for name in other if name in _OPTIONS]
    command = " ".join(["%accelerate restart", *options])
    if len(options) < len(other):
        command = "%accelerate stop"
    # Texts of variables may be secrets, and a notebook is saved with its errors.
    held = ", ".join(
        f"env of {', '.join(has.env or ()) or 'nothing'}"
        if name == "env"
        else f"{name}={getattr(has, name)!r}"
        for name in other
    )
    raise ConfigError(
        f"the session was started with {held}: `{command}` ends it, with all its names, for one "
        "with other settings; `%%accelerate --fresh` runs a cell in ranks of its own"
    )


def end_session() -> bool:
    """End the session; False where there is none."""
    global _session
    ending, _session = _session, None
    if ending is None:
        return False
    ending.end()
    return True
