"""The folder of a sweep on disk, by which another kernel goes on with it.

runs folder/sweeps/20260131-120000-1a2b3c/
  study.log    the Optuna study, if there is one
  call.pkl     the arguments of ``sweep``            } with detach=True
  trials.pkl   a record for each trial, as it begins }
"""

from __future__ import annotations

import contextlib
import fcntl
import pickle
import shutil
import time
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import cloudpickle

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch import detached
from notebook_accel.launch.control.run_folder import RunFolder, new_run_id, runs_folder
from notebook_accel.system.own_files import make_folder, own_file
from notebook_accel.wire import KnobValue

# The newest stay.
_KEPT_SWEEPS = 50
_POLL_SECONDS = 0.05


class TrialChoice(NamedTuple):
    """What a trial is launched with, as the sweep or a person chose it.

    Attributes:
        arguments: what the sweep chooses.
        knobs: of a clone, the values with which its knobs begin.
        origin: the id of the run that it is a clone of; "" for what the sweep asks for itself.
        resume: the folder of the checkpoint with which it begins.
    """

    arguments: Mapping[str, Any]
    knobs: Mapping[str, KnobValue]
    origin: str = ""
    resume: str = ""


class TrialRecord(NamedTuple):
    """A trial that begins: its run's id, and its number in the study."""

    run: str
    chosen: TrialChoice
    asked: int | None


class SweepFolder:
    """The folder of one sweep, which is made once something is written there."""

    def __init__(self, sweep_id: str = "") -> None:
        self.id = sweep_id or new_run_id()
        self._root = runs_folder() / "sweeps"
        self.path = self._root / self.id
        self._trials = self.path / "trials.pkl"
        self._held: IO[str] | None = None

    def make(self) -> None:
        make_folder(self.path)
        for old in sorted(self._root.iterdir())[:-_KEPT_SWEEPS]:
            shutil.rmtree(old, ignore_errors=True)

    @property
    def has_call(self) -> bool:
        return (self.path / "call.pkl").exists()

    def hold(self, asked: Mapping[str, Any]) -> None:
        """Keep other kernels from going on with the sweep, and save what it was asked for.

        Raises:
            NotebookAccelError: another kernel, or an earlier call in this one, holds it.
        """
        self.make()
        self._held = open(self.path / ".lock", "a", opener=own_file)  # noqa: SIM115 (kept open)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.let_go()
            raise NotebookAccelError(
                f"sweep {self.id} goes on in the kernel that has it: only once that has ended can "
                "another one go on with it"
            ) from None
        if not self.has_call:
            with open(self.path / "call.pkl", "wb", opener=own_file) as file:
                cloudpickle.dump(asked, file)

    def let_go(self) -> None:
        if self._held is not None:
            self._held.close()

    def load_call(self) -> dict[str, Any]:
        try:
            with open(self.path / "call.pkl", "rb", opener=own_file) as file:
                asked: dict[str, Any] = pickle.load(file)
                return asked
        except Exception as error:  # what classes raise that are made again
            raise NotebookAccelError(
                f"sweep {self.id} cannot be read ({type(error).__name__}: {error}): import what "
                "its function uses, and attach again"
            ) from error

    def add(self, trial: TrialRecord) -> None:
        with open(self._trials, "ab", opener=own_file) as file:
            cloudpickle.dump(trial, file)

    def trials(self) -> list[TrialRecord]:
        """Return the trials that began.

        The kernel may have been killed before it launched the one that it recorded last.
        """
        found: list[TrialRecord] = []
        # A record that was cut off by the kernel's end is none.
        with (
            contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError),
            open(self._trials, "rb", opener=own_file) as file,
        ):
            while True:
                found.append(pickle.load(file))
        while found:
            is_kept = detached.has_keeper(found[-1].run)  # asked first: it ends with its run
            if RunFolder(runs_folder() / found[-1].run).load() is not None:
                break
            if not is_kept:
                return found[:-1]
            time.sleep(_POLL_SECONDS)
        return found
