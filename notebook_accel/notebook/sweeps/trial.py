"""One trial of a sweep: its run, what it has logged, and what another kernel goes on with.

runs folder/sweeps/20260131-120000-1a2b3c/
  study.log    the Optuna study, if there is one
  call.pkl     the arguments of ``sweep``            } with detach=True
  trials.pkl   run id and choice of each trial, as it begins }
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pickle
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import cloudpickle

from notebook_accel.errors import ConfigError, NotebookAccelError, WorkerError
from notebook_accel.launch import detached
from notebook_accel.launch.control.curves import Curve
from notebook_accel.launch.control.metrics_file import MetricReader
from notebook_accel.launch.control.run_folder import RunFolder, new_run_id, runs_folder
from notebook_accel.launch.run import Run, call_of, raise_error
from notebook_accel.system.own_files import make_folder, own_file
from notebook_accel.wire import KnobValue

# Optuna copies all earlier ones at each, in memory.
_MAX_REPORTS = 10_000
# Of a curve; a chart has those of all trials.
_POINTS = 66
# The length of a loader is told at most so long after the first value.
_LENGTH_SECONDS = 1.0


@dataclass
class Trial:
    """One trial of a sweep.

    Attributes:
        chosen: what the sweep, or a person, chose for it.
        run: its run.
        asked: Optuna's trial; None without a study.
        mode: whether low or high values are good, "min" or "max".
        newest: the last value that it logged; None before the first.
        pruned: whether the pruner has ended it.
        rounds: its turns, of which the last one lasts until its end.
        turns: those that are over.
        pausing: done once it is paused, or could not be.
        last_step: that of the value that was reported last.
        is_paused, is_over: whether it waits for its next turn, or has ended and is counted.
        is_next: whether it goes on before all others, once it is paused.
        curve: the values that it logged.
    """

    number: int
    chosen: TrialChoice
    run: Run
    asked: Any
    mode: str
    rounds: int = 1
    newest: float | None = None
    pruned: bool = False
    turns: int = 0
    pausing: Future[None] | None = None
    is_paused: bool = False
    is_over: bool = False
    is_next: bool = False
    curve: Curve = field(default_factory=lambda: Curve(_POINTS))
    _tail: MetricReader = field(init=False)
    last_step: int = -1
    _num_reports: int = 0
    _turn_began: int = 0
    _had_length: bool = False
    # When the first value of its turn came.
    _new_since: float | None = None

    def __post_init__(self) -> None:
        self._tail = MetricReader(call_of(self.run).folder.path)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments and knobs by name, as they are shown."""
        return {**self.chosen.arguments, **self.chosen.knobs}

    @property
    def status(self) -> str:
        """That of its run, or "pruned"."""
        is_cut = self.pruned and self.has_ended and self.run.status != "failed"
        return "pruned" if is_cut else self.run.status

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended: it logs nothing from then on."""
        return call_of(self.run).ended.is_set()

    @property
    def has_value(self) -> bool:
        return self.newest is not None and math.isfinite(self.newest)

    def read(self, metric: str | None) -> Iterator[None]:
        """Read what the trial has logged since; yield after each value that Optuna was told of."""
        call_of(self.run).metrics.flush()
        for row in self._tail.read_new():
            if row["name"] != metric:
                continue
            self._new_since = self._new_since or time.monotonic()
            self.newest = row["value"]
            self.curve.add(row["step"], row["value"])
            is_full = self._num_reports >= _MAX_REPORTS
            if self.asked is None or self.pruned or is_full or self.turns < self.rounds - 1:
                continue
            # Optuna takes a step once; in many loops the steps begin anew with each epoch.
            self.last_step = max(row["step"] or 0, self.last_step + 1)
            self._num_reports += 1
            self.asked.report(row["value"], self.last_step)
            yield

    def has_had_its_turn(self) -> bool:
        """Whether it has trained its share of an epoch, and has logged a value meanwhile.

        Raises:
            ConfigError: its loader has no length, of which its share would be a part.
        """
        rank = self.run.state.ranks[0]
        # Streams for evaluation may come beside a loader that has one.
        self._had_length |= rank.total_batches is not None
        if self.turns >= self.rounds - 1 or self._new_since is None:
            return False
        if rank.total_batches is None:
            is_told = time.monotonic() - self._new_since > _LENGTH_SECONDS
            if is_told and rank.batches and not self._had_length:
                raise ConfigError(
                    f"rounds={self.rounds}: the loader of trial {self.number} has no length, so "
                    "that no share of an epoch can be trained: give its dataset a __len__, or "
                    "leave rounds= out"
                )
            return is_told
        share = math.ceil(rank.total_batches / self.rounds)
        return rank.batches >= self._turn_began + share

    def end_turn(self) -> None:
        """Count a turn, and report the newest value under its number: all trials have that."""
        self.turns += 1
        self.last_step, self._new_since = self.turns, None
        self._turn_began = self.run.state.ranks[0].batches
        if self.asked is not None and self.newest is not None:
            self.asked.report(self.newest, self.turns)

    def error(self) -> tuple[BaseException, tuple[Any, ...]]:
        """Return why the run has failed, and what is equal for failures that are alike.

        That is type and place of an exception, or how the rank died.
        """
        error: BaseException = RuntimeError()
        try:
            if self.run.state.failure is not None:
                raise_error(self.run)
        except BaseException as caught:  # to be raised by whoever waits for the sweep
            error = caught
        if not isinstance(error, WorkerError):
            return error, (str(error),)
        places = re.findall(r'File "(.+)", line (\d+)', error.traceback)
        last = error.traceback.strip().rpartition("\n")[2]
        return error, (last.partition(":")[0], *places[-1:], error.exitcode, error.signal)

    def last_line_of_error(self) -> str:
        """Return what the failure was, for the table; "" if there is none."""
        failure = self.run.state.failure
        return "" if failure is None else in_a_line(failure.traceback, failure.message)

    def end(self, *, at_once: bool = False) -> None:
        """Ask the run to stop, or kill it, unless it has ended."""
        with contextlib.suppress(OSError):
            if at_once and not self.has_ended:
                self.run.kill()
            elif self.run.status in ("starting", "running", "paused"):  # a second one interrupts
                self.run.stop()


def in_a_line(traceback: str, message: str) -> str:
    """Return a traceback's last line; without one, as of a killed rank, the message's first."""
    return traceback.strip().rpartition("\n")[2] or message.strip().partition("\n")[0]


# ---- the folder of a sweep ----------------------------------------------------------------

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
        asked: its number in the study; None without one.
    """

    arguments: Mapping[str, Any]
    knobs: Mapping[str, KnobValue]
    origin: str = ""
    resume: str = ""
    asked: int | None = None


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

    def add(self, run_id: str, trial: TrialChoice) -> None:
        with open(self._trials, "ab", opener=own_file) as file:
            cloudpickle.dump((run_id, trial), file)

    def trials(self) -> list[tuple[str, TrialChoice]]:
        """Return the trials that began, each with the id of its run, and keep no other record.

        The kernel may have been killed before it launched the one that it recorded last.
        """
        found: list[tuple[str, TrialChoice]] = []
        ends = [0]
        # A record that was cut off by the kernel's end is none.
        with (
            contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError),
            open(self._trials, "rb", opener=own_file) as file,
        ):
            while True:
                found.append(pickle.load(file))
                ends.append(file.tell())
        while found:
            run_id, _ = found[-1]
            is_kept = detached.has_keeper(run_id)  # asked first: it ends with its run
            if RunFolder(runs_folder() / run_id).load() is not None:
                break
            if not is_kept:
                found.pop()
                break
            time.sleep(_POLL_SECONDS)
        # This kernel adds its own behind them, which a later one reads.
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self._trials, ends[len(found)])
        return found
