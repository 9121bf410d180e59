"""Which checkpoint a launch goes on from: ``notebook_launcher(..., resume=...)``."""

from __future__ import annotations

import os
import secrets
from importlib import import_module
from pathlib import Path

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.launch.run import Run, save_to
from notebook_accel.text_values import shown

# In the folder of a run that was stopped, once another goes on from there.
_STOPPED = "stopped"


def folder_to_resume(source: object) -> str:
    """Return the folder of a run's newest state, or a folder of checkpoints after a look into it.

    Raises:
        ConfigError: there is no checkpoint, or ``source`` is something else.
    """
    if isinstance(source, Run):
        return _folder_of(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"resume={shown(source)}: expected a run, such as last_run(), or a folder of "
            "checkpoints"
        )
    folder = Path(source).expanduser().resolve()
    # Imported when it is used: it needs torch.
    start = import_module("notebook_accel.training.checkpoint.start")
    if not start.candidates(folder):
        what = "there is no checkpoint in it" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"resume={str(source)!r}: {what}")
    return str(folder)


def folder_for_clone(run: Run) -> str:
    """Return what a clone begins with: a checkpoint of this moment, or what an ended run left."""
    if run.state.has_ended:
        return folder_to_resume(run)
    if run.status == "paused":
        raise ConfigError(f"{run!r} is paused: run.go_on() first, or clone it without warm=True")
    folder = run.log_dir / f"warm-{secrets.token_hex(4)}"
    save_to(run, folder)
    if not folder.is_dir():
        raise ConfigError(f"{run!r} has prepared no model yet, with which a clone could begin")
    return str(folder)


def _folder_of(run: Run) -> str:
    lost = ""
    if run.state.has_ended:
        try:
            if (rescued := run.rescued) is not None:
                folder = run.log_dir / _STOPPED
                if not folder.exists():
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    rescued.write_checkpoint(folder)
                return str(folder)
        except (NotebookAccelError, ValueError, OSError) as error:
            lost = f"; what was trained when it was stopped cannot be used: {error}"
    if Path(run.state.checkpoint or "-").is_dir():
        return run.state.checkpoint
    if run.state.checkpoint:
        why = f"Its newest checkpoint, {run.state.checkpoint}, is not there any more"
    elif not run.state.has_ended:
        why = "It goes on, and has written no checkpoint: run.stop() it, or run.save()"
    else:
        why = (
            "It wrote no checkpoint, and was not stopped while it trained prepared models (a "
            "function that reads should_stop returns by itself): save_state() or "
            "resume_or_start() keeps one"
        )
    raise ConfigError(f"resume={run!r}: it left nothing to go on from. {why}{lost}")
