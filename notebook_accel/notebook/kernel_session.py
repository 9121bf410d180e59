"""The one session of this kernel: started at its first use, found, and ended."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from notebook_accel.config import LaunchConfig, given_settings, resolve
from notebook_accel.errors import ConfigError
from notebook_accel.launch.launcher import check_ranks
from notebook_accel.launch.text import wording
from notebook_accel.launch.view import View
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.rank_displays import say
from notebook_accel.notebook.session import NotebookSession, num_ranks

_OPTIONS = {"num_processes": "-n", "mixed_precision": "--mixed-precision"}

_session: NotebookSession | None = None


class StartingLine(View):
    """The view of a session's start: a line that says that it starts, then how long that took."""

    def __init__(self) -> None:
        self._slot = DisplaySlot()
        self._began = time.monotonic()

    def launch_is_slow(self, name: str, importing: str = "") -> None:
        what = f": importing {importing}" if importing else ""
        self._show(f"{name} starts, which takes some seconds{what}")

    def waits_for_machines(self, text: str) -> None:
        self._show(text)

    def launch_failed(self) -> None:
        if self._slot.is_placed:
            self._show("the session was not started")

    def conclude(self, world_size: int) -> None:
        seconds = wording.span(time.monotonic() - self._began)
        started = f"session of {num_ranks(world_size)} started in {seconds}"
        self._show(f"{started}; %accelerate stop ends it")

    def _show(self, text: str) -> None:
        say(text, self._slot)


def current_session() -> NotebookSession | None:
    """Return the kernel's session, also with dead ranks: a new one would lack its variables."""
    return _session


def start_session(
    shell: InteractiveShell, config: LaunchConfig, notices: Sequence[str] = ()
) -> NotebookSession:
    """Start the session of this kernel.

    Raises:
        ConfigError: there is a session already, or its ranks cannot be started with these settings.
        LaunchError: the ranks could not be started.
    """
    global _session
    running = current_session()
    if running is not None:
        raise ConfigError(
            f"there is a session of {num_ranks(running.world_size)}: `%accelerate restart` starts "
            "another one in its place"
        )
    line = StartingLine()
    try:
        _session = NotebookSession(shell, config, notices, view=line)
    except BaseException:
        line.launch_failed()
        raise
    line.conclude(_session.world_size)
    return _session


def restart_session(
    shell: InteractiveShell, config: LaunchConfig, notices: Sequence[str] = ()
) -> NotebookSession:
    """End the session, if there is one, and start a new one; the old one survives a ConfigError."""
    check_ranks(config)
    end_session()
    return start_session(shell, config, notices)


def session_for(
    shell: InteractiveShell,
    arguments: Mapping[str, Any],
    config: LaunchConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> NotebookSession:
    """Return the session of this kernel; start one if there is none, or if a device is lost.

    Environment and config file count only for a session that is started now.

    Raises:
        ConfigError: the session was started with other settings, or cannot be started with these.
        LaunchError: the ranks could not be started.
    """
    running = current_session()
    if running is None:
        return start_session(shell, *resolve(arguments, config))
    asked, _ = given_settings(arguments, config)
    given = {name: value for name, value in asked.items() if value is not None}
    has = replace(running.config, num_processes=running.world_size)
    wanted = LaunchConfig(**given)
    if other := [name for name in given if getattr(wanted, name) != getattr(has, name)]:
        command = "%accelerate stop"
        if _OPTIONS.keys() >= set(other):
            options = (f"{_OPTIONS[name]} {getattr(wanted, name)}" for name in other)
            command = " ".join(["%accelerate restart", *options])
        # Texts of variables may be secrets, and a notebook is saved with its errors.
        held = ", ".join(
            f"env of {', '.join(has.env or ()) or 'nothing'}"
            if name == "env"
            else f"{name}={getattr(has, name)!r}"
            for name in other
        )
        raise ConfigError(
            f"the session was started with {held}: `{command}` ends it, with all its names, for "
            "one with other settings; `%%accelerate --fresh` runs a cell in ranks of its own"
        )
    lost = running.lost_with_device
    return restart_session(shell, running.config, [lost]) if lost else running


def end_session() -> bool:
    """Return whether there was one."""
    global _session
    ending, _session = _session, None
    if ending is None:
        return False
    ending.end()
    return True
