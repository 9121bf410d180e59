"""``sweep`` and the handle that it returns: starts trials, follows them, and ends them.

All trials are started and followed by one thread of the sweep; the methods of :class:`Sweep` may be
called from any thread, and only set what that thread reads.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psutil

from notebook_accel import wire
from notebook_accel.config import resolve
from notebook_accel.config.checks import as_choice, as_count, as_flag, as_seconds, shown
from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.launch import detached, run_list
from notebook_accel.launch.control.run_folder import new_run_id
from notebook_accel.launch.control.run_state import TrialOf
from notebook_accel.launch.launcher import folder_for_clone, named_arguments
from notebook_accel.launch.preflight import check_call
from notebook_accel.launch.run import Run, call_of
from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view import GuardedView, View
from notebook_accel.notebook import clicks
from notebook_accel.notebook.controls import Cloneable
from notebook_accel.notebook.display_slot import DisplaySlot, start_thread
from notebook_accel.notebook.launcher import notebook_launcher, settings_of, trial_to_launch
from notebook_accel.notebook.sweeps.panel import SweepPanel, as_bundle, in_order
from notebook_accel.notebook.sweeps.space import LEASES, Arguments, Leases
from notebook_accel.notebook.sweeps.trial import SweepFolder, Trial, TrialChoice, in_a_line
from notebook_accel.notebook.tracebacks import show_in_short
from notebook_accel.notebook.views import Dashboard, choose_view
from notebook_accel.render.snapshot import render_line
from notebook_accel.system.interrupts import held

# Between two looks at the trials, and two drawings of the table.
_LOOK_SECONDS = 0.05
# How soon it is noticed that a trial has ended: a look takes some 10 us, for hours.
_POLL_SECONDS = 0.01
_DRAW_SECONDS = 0.5
_GO_ON_SECONDS = 30.0
_INTERRUPTED = (
    "the sweep was interrupted; the next cell has it as sys.last_value.sweep, and its trials in "
    "runs()"
)
# Arguments of the launcher that make no sense for a trial.
_NOT_FOR_TRIALS = (
    "session", "node_rank", "num_nodes", "join_token", "master_addr", "use_port",
    "rdzv_backend", "rdzv_conf", "rdzv_endpoint", "rdzv_id", "name", "resume",
)  # fmt: skip


class Sweep:
    """The trials of a sweep, while they run and afterwards.

    ``len(sweep)`` is the number of trials that were started; iteration gives their runs, in the
    order of the trials.

    Attributes:
        id: name of the sweep's folder, by which ``attach`` finds it if it was detached.
        study: the Optuna study; None for a grid or list without a pruner.

    Example:
        >>> from notebook_accel import sweep
        >>> s = sweep(lambda lr: 2 * lr, {"lr": [0.5, 1.0]}, view="none")
        >>> [run[0] for run in s]
        [1.0, 2.0]
    """

    def __init__(
        self,
        call: partial[Any],
        asked: Mapping[str, Any],
        folder: SweepFolder,
        arguments: Arguments,
        leases: Leases,
        launch: Callable[[TrialChoice, tuple[int, ...]], Run],
        slot: DisplaySlot,
    ) -> None:
        self.id, self.study = folder.id, arguments.study
        self._folder, self._call = folder, call
        self._name, view = _name_of(call.func), asked["launch"].get("view", "auto")
        self._arguments, self._leases, self._launch = arguments, leases, launch
        self._metric, self._mode, self._rounds = asked["metric"], asked["mode"], asked["rounds"]
        self._max_failures = asked["max_failures"]
        self._trials: list[Trial] = []
        self._said = ""
        self._failures: dict[tuple[Any, ...], list[BaseException]] = {}
        self._error: BaseException | None = None
        for run_id, chosen in folder.trials():
            self._take_up(run_id, chosen)
        arguments.give_up_others()
        self._stop_asked, self._ended = threading.Event(), threading.Event()
        self._kernel, self._is_shown = clicks.find_kernel(), view != "none"
        self._slot = slot
        self._panel: SweepPanel | None = None
        self._drawn, self._guard = 0.0, GuardedView(View()).guard
        if isinstance(choose_view(view), Dashboard):
            self._panel = SweepPanel(self._kernel, self._slot, self.stop, self._cloneable)
            self._panel.draw(self._title(), [], self._metric, [])
            self._panel.show(f"sweep of {self._title()}")
        elif self._kernel is not None and self._is_shown:
            self._slot.show(self._bundle())
        start_thread(self._conduct, name=f"notebook-accel sweep of {self._name}")

    # ---- for the person --------------------------------------------------------------------

    @property
    def runs(self) -> list[Run]:
        """The runs of all trials that were started, in the order of the trials."""
        return [trial.run for trial in [*self._trials]]

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    @property
    def best(self) -> Run:
        """The run with the best value; a trial's value is the last that it logged as ``metric``.

        Failed trials and values that are not finite do not count, and pruned or stopped trials only
        if no other trial has ended.

        Raises:
            ConfigError: the sweep was made without ``metric``.
            NotebookAccelError: no trial has such a value.
        """
        best = self._best_trial()
        if best is None:
            if self._metric is None:
                raise ConfigError("the sweep has no metric=, by which a trial could be the best")
            failed = [one for one in self._trials if one.run.status == "failed"]
            if failed and len(failed) == len(self._trials):
                why = one_line(failed[0].last_line_of_error(), 200)
                raise NotebookAccelError(f"all {len(failed)} trials failed, the first with: {why}")
            raise NotebookAccelError(
                f"no trial has a finite value of {self._metric!r}{self._what_was_logged()}"
            )
        return best.run

    def _best_trial(self, *, so_far: bool = False) -> Trial | None:
        trials = [one for one in [*self._trials] if one.has_value and one.status != "failed"]
        whole = [trial for trial in trials if so_far or trial.status == "succeeded"]
        return next(iter(in_order(whole or trials, self._mode)), None)

    def stop(self) -> None:
        """Start no further trial, and ask those that run to stop; return at once."""
        self._stop_asked.set()

    def wait(self, timeout: float | None = None) -> Sweep:
        """Wait for the end of all trials, and return this sweep.

        Trials that failed raise nothing, unless ``max_failures`` of them failed alike.

        Args:
            timeout: seconds to wait; None for no limit. The sweep goes on afterwards.

        Raises:
            WorkerError: the first of ``max_failures`` failures that are alike.
            LaunchError: a trial could not be started.
            ConfigError: no trial has logged ``metric``, or the settings of the launch are invalid.
            TimeoutError: the sweep has not ended in time.

            All have the sweep as ``error.sweep``.
        """
        if timeout is not None:
            as_seconds("timeout", timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        pump = clicks.ClicksAfterTheCell(None) if self._panel is None else self._panel.clicks
        error: Any
        try:
            while not self._ended.wait(max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    error = TimeoutError(f"the sweep has not ended within {timeout} s; it goes on")
                    error.sweep = self
                    raise error
                pump.pump()
        finally:
            pump.stop_pumping()
        if self._slot.is_placed and not clicks.draws_updates(self._kernel):
            self._slot.place()
        error = self._error
        if error is not None:
            error.sweep = self
            raise error
        return self

    def show(self) -> None:
        """Show the table of trials in the current cell; while they run it is live there."""
        if self._kernel is None:
            sys.stdout.write(f"{self._bundle()['text/plain']}\n")
            return
        if self._panel is None or self._ended.is_set():
            self._slot.show(self._bundle(), is_to_place=False)
        self._slot.place()
        if self._panel is not None and not self._ended.is_set():
            self._panel.below.place()

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each trial, in their order.

        The columns are ``trial``, ``state``, the arguments by their names, the metric's last value
        by its name (``value`` if an argument has that name) and ``run``, the run's id. Where an
        argument has one of these names, the sweep's column is ``trial_number``, ``trial_state`` or
        ``trial_run``.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise ImportError("sweep.to_pandas() needs pandas: pip install pandas") from None
        arguments = {name for trial in self._trials for name in trial.settings}
        own = {"trial": "trial_number", "state": "trial_state", "run": "trial_run"}
        number, state, run = (new if name in arguments else name for name, new in own.items())
        taken = {*arguments, *own}
        value = "value" if self._metric is None or self._metric in taken else self._metric
        return pd.DataFrame(
            [
                {
                    number: trial.number,
                    state: trial.status,
                    **trial.settings,
                    value: math.nan if trial.newest is None else trial.newest,
                    run: trial.run.id,
                }
                for trial in self._trials
            ]
        )

    def __repr__(self) -> str:
        return f"<Sweep of {self._title()}>"

    @property
    def _running(self) -> list[Trial]:
        return [one for one in [*self._trials] if not (one.is_paused or one.is_over)]

    @property
    def _paused(self) -> list[Trial]:
        return [one for one in [*self._trials] if one.is_paused]

    # ---- in the sweep's thread -------------------------------------------------------------

    def _conduct(self) -> None:
        try:
            while not self._stop_asked.is_set() and self._error is None:
                self._start_trials()
                if not (self._running or self._paused) and self._arguments.close(at_once=False):
                    break
                self._wait_for_an_end()
                self._look()
        except BaseException as error:  # a launch that failed; raised by whoever waits
            self._error = error
            for trial in [*self._running, *self._paused]:
                trial.asked = None  # it may be Optuna that has failed
        self._arguments.close(at_once=True)
        try:
            for trial in self._running:
                trial.end()
            while self._running or self._paused:
                self._end_paused()
                self._wait_for_an_end()
                self._look()
            if not self._stop_asked.is_set():
                self._check_metric()
            # An error in what is shown ends no training.
            self._guard(self._draw, True)
        finally:
            self._folder.let_go()
            self._ended.set()

    def _end_paused(self) -> None:
        """End the paused trials that come back to devices on which none of this sweep is."""
        used = {device for trial in self._running for device in trial.run.state.devices}
        for trial in self._paused:
            devices = trial.run.state.devices
            if used.isdisjoint(devices):
                used.update(devices)
                trial.is_paused = False
                trial.end()

    def _wait_for_an_end(self) -> None:
        """Wait until a trial has ended, or the next look is due."""
        due, under_way = time.monotonic() + _LOOK_SECONDS, [*self._running, *self._paused]
        while time.monotonic() < due and not any(trial.has_ended for trial in under_way):
            time.sleep(_POLL_SECONDS)

    def _start_trials(self) -> None:
        while len(self._running) < self._leases.at_a_time and not self._stop_asked.is_set():
            waiting = sorted(self._paused, key=lambda one: (not one.is_next, one.turns, one.number))
            first = waiting[0] if waiting else None
            with run_list.choosing:
                if self._arguments.has_more and (first is None or self._can_begin(first)):
                    one_more = self._begin()
                else:
                    one_more = self._go_on(waiting)
            if not one_more:  # all have begun, or the devices are another run's meanwhile
                return

    def _begin(self) -> bool:
        devices = self._leases.take()
        if devices is None:
            return False
        chosen, asked = self._arguments.ask()
        run_id = new_run_id()
        if self._folder.has_call:
            # Before the launch: the kernel may be killed in its midst, and the trial goes on.
            self._folder.add(run_id, chosen)
        of_sweep = TrialOf(
            sweep=self.id,
            name=self._name,
            number=len(self._trials),
            metric=self._metric,
            mode=self._mode,
        )
        of_clone = {"knobs": chosen.knobs, "origin": chosen.origin}
        trial_to_launch.set({"run_id": run_id, "trial": of_sweep, **of_clone})
        self._follow(chosen, self._launch(chosen, devices), asked)
        return True

    def _follow(self, chosen: TrialChoice, run: Run, asked: Any, **of_study: Any) -> None:
        number, mode, rounds = len(self._trials), self._mode, self._rounds
        self._trials.append(Trial(number, chosen, run, asked, mode, rounds, **of_study))

    def _take_up(self, run_id: str, chosen: TrialChoice) -> None:
        """Follow a trial that another kernel began: it goes on, or has ended."""
        asked, of_study = self._arguments.ask_again(chosen)
        try:
            view = partial(choose_view, "none")
            run = detached.attach(run_id, view=view, view_of_past=view)
        except NotebookAccelError as error:
            self._said = f"a trial is left out: {one_line(str(error), 200)}"
            return
        self._follow(chosen, run, asked, **of_study)

    def _can_begin(self, first: Trial) -> bool:
        """Return whether a further trial begins before ``first``, which is paused, goes on."""
        needed = max(sum(rank.memory or 0 for rank in one.run.state.ranks) for one in self._paused)
        has_room = psutil.virtual_memory().available > needed
        if not has_room:
            self._said = "host memory is short: no further trial begins until one has ended"
        return has_room and not first.is_next

    def _go_on(self, waiting: Sequence[Trial]) -> bool:
        """Let the first paused trial go on whose devices are free, or end it if it is pruned."""
        for trial in waiting:
            if self._leases.take(trial.run.state.devices) is not None:
                trial.is_paused = trial.is_next = False
                if self._arguments.should_prune(trial, after_turn=True):
                    self._prune(trial)
                else:
                    # One that ends meanwhile may never answer.
                    wait([call_of(trial.run).go_on()], _GO_ON_SECONDS)
                return True
        return False

    def _prune(self, trial: Trial) -> None:
        trial.pruned = True
        trial.end()

    def _follow_turn(self, trial: Trial) -> None:
        """Pause a trial whose turn is over, if others wait."""
        pausing = trial.pausing
        if pausing is not None and pausing.done():
            trial.pausing = None
            if pausing.exception() is None:
                trial.is_paused = trial.run.status == "paused"  # not where it was stopped meanwhile
            elif not all(rank.has_ended for rank in trial.run.state.ranks):
                trial.turns = self._rounds
                why = one_line(str(pausing.exception()), 200)
                self._said = f"trial {trial.number} could not be paused: {why}"
        elif pausing is None and trial.run.status == "running" and trial.has_had_its_turn():
            trial.end_turn()
            if self._arguments.has_more or self._paused:
                trial.pausing = call_of(trial.run).act(wire.Action(kind="pause"))
            elif self._arguments.should_prune(trial, after_turn=True):
                self._prune(trial)

    def _look(self) -> None:
        """Read what the running trials have logged, and take leave of those that have ended."""
        for trial in [*self._running, *(one for one in self._paused if one.has_ended)]:
            # Asked before what it logged is read: nothing comes after.
            has_ended = trial.has_ended
            reports = trial.read(self._metric)
            decided = [self._arguments.should_prune(trial) for _ in reports]
            if any(decided) and not has_ended:
                self._prune(trial)
            if has_ended:
                trial.is_paused, trial.is_over = False, True
                self._take_leave(trial)
            elif self._error is None:  # which a turn may have raised
                self._follow_turn(trial)
        self._guard(self._draw, False)

    def _take_leave(self, trial: Trial) -> None:
        has_failed = trial.run.status == "failed"
        is_cut = trial.pruned or trial.run.status == "stopped"
        self._arguments.tell(trial.asked, trial.newest, pruned=is_cut, failed=has_failed)
        if self._kernel is None and self._is_shown:
            named = wording.arguments((), trial.settings)
            value = "" if trial.newest is None else f", {self._metric} {trial.newest:g}"
            why = f": {one_line(trial.last_line_of_error(), 200)}" if has_failed else ""
            sys.stdout.write(f"trial {trial.number} ({named}): {trial.status}{value}{why}\n")
            sys.stdout.flush()
        if has_failed:
            error, kind = trial.error()
            alike = self._failures.setdefault(kind, [])
            alike.append(error)
            if len(alike) >= self._max_failures and self._error is None:
                self._error = alike[0]
        else:
            self._check_metric(self._max_failures)

    def _check_metric(self, least: int = 1) -> None:
        """End the sweep by an error if so many trials succeeded and none has logged the metric."""
        succeeded = sum(trial.status == "succeeded" for trial in self._trials)
        has_value = any(trial.newest is not None for trial in self._trials)
        if self._metric is None or succeeded < least or has_value or self._error is not None:
            return
        self._error = ConfigError(f"no trial has logged {self._metric!r}{self._what_was_logged()}")

    def _what_was_logged(self) -> str:
        ranks = (rank for trial in self._trials for rank in trial.run.state.ranks)
        names = dict.fromkeys(name for rank in ranks for name in rank.metrics)
        listed = one_line(", ".join(names), 200) or "nothing, by accelerator.log or otherwise"
        return f"; they logged {listed}"

    # ---- what is shown ---------------------------------------------------------------------

    def _title(self) -> str:
        num_running, num_paused = len(self._running), len(self._paused)
        ended = len(self._trials) - num_running - num_paused
        parts = [f"{ended} of {self._arguments.num_trials} trials ended"]
        parts += [f"{num_running} running"] if num_running else []
        parts += [f"{num_paused} paused"] if num_paused else []
        failed = sum(trial.run.status == "failed" for trial in self._trials)
        parts += [f"{failed} failed"] if failed else []
        # While trials go on, the one in colour, which stands first.
        best = self._best_trial(so_far=bool(num_running or num_paused))
        if best is not None and best.newest is not None:
            value = f"{self._metric} {wording.number(best.newest)}"
            parts.append(f"best is trial {best.number} ({value})")
        return f"{self._name}: {', '.join(parts)}"

    def _notes(self) -> list[str]:
        notes = [self._said] if self._said else []
        if self._folder.has_call and not self._ended.is_set():
            notes.append(f"goes on after a restart of the kernel: attach({self.id!r})")
        if self._leases.awaited:
            notes.append(f"waits for devices of {one_line(self._leases.awaited, 200)}")
        if self._error is not None:
            last = in_a_line(getattr(self._error, "traceback", ""), str(self._error))
            notes.append(f"ended early: {one_line(last, 200)}")
        return notes

    def _bundle(self) -> dict[str, str]:
        trials = in_order([*self._trials], self._mode)
        return as_bundle(f"sweep of {self._title()}", trials, self._metric, self._notes())

    def _draw(self, is_last: bool) -> None:
        panel = self._panel
        if panel is not None:
            panel.follow()
        is_due = time.monotonic() - self._drawn > _DRAW_SECONDS or is_last
        if not self._slot.is_placed or not (is_due or (panel is not None and panel.was_clicked)):
            return
        if panel is None:
            self._slot.show(self._bundle())
        elif is_last:
            panel.finish(self._bundle())
        else:
            trials = in_order([*self._trials], self._mode)
            panel.draw(self._title(), trials, self._metric, self._notes())
        self._drawn = time.monotonic()

    # ---- clicks on the panel ---------------------------------------------------------------

    def _cloneable(self, trial: Trial) -> Cloneable:
        call = partial(self._call, **trial.chosen.arguments)
        return Cloneable(trial.run, call, partial(self._add_clone, trial))

    def _add_clone(
        self, trial: Trial, changes: Mapping[str, Any], *, knobs: Any, name: str, warm: bool
    ) -> str:
        resume = folder_for_clone(trial.run) if warm else ""
        arguments = {**trial.chosen.arguments, **changes}
        number = self._arguments.add(TrialChoice(arguments, knobs, trial.run.id, resume))
        return f"trial {number} is added: {name}"

    def _end_now(self) -> None:
        """Stop, and wait for the end; a further interrupt kills the trials that still run."""
        self.stop()
        try:
            self._ended.wait()
        except KeyboardInterrupt:
            for trial in [*self._running, *self._paused]:
                trial.end(at_once=True)
            self._ended.wait()


def sweep(
    function: Callable[..., Any],
    space: Any,
    *,
    metric: str | None = None,
    mode: str = "min",
    num_trials: int | None = None,
    num_processes: int = 1,
    concurrent: int | None = None,
    rounds: int = 1,
    sampler: Any = None,
    pruner: Any = None,
    max_failures: int = 3,
    engine: str = "auto",
    block: bool = True,
    detach: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **launch: Any,
) -> Sweep:
    """Run a function with many settings, as many at a time as there are free devices.

    Each trial is a run of its own, and one table shows them all. It calls
    ``function(*args, **kwargs, **arguments)`` on ``num_processes`` ranks.

    Args:
        function: as for ``notebook_launcher``. It is sent anew with each trial.
        space: a dictionary of lists, of which each combination is a trial; a list of dictionaries,
            one for each trial; or a dictionary of Optuna's distributions.
        metric: name of a value that the function logs (``accelerator.log``); the last is the
            trial's value.
        mode: "min" if lower values are better, or "max".
        num_trials: number of trials; needed for distributions, and only for them.
        num_processes: ranks of a trial.
        concurrent: trials at a time. None: as many as have an accelerator for each rank or, without
            accelerators, a core for each. With more than that, trials share.
        rounds: with more trials than fit at a time, they take turns: each trains this part of an
            epoch (8: an eighth) and until it has logged ``metric``, then it is paused, and the next
            one begins or goes on. After each turn the pruner decides. The last of so many turns
            lasts until the trial's end. 1: each trial trains to its end at once.
        sampler: Optuna's sampler for distributions; None for Optuna's default.
        pruner: Optuna's pruner, which sees each value of ``metric``; a pruned trial is stopped as
            by ``run.stop()``. None prunes nothing.
        max_failures: so many trials that fail alike (type and place of the error) end the sweep;
            other failed trials are rows of the table.
        engine: "auto" or "local"; "ray" for trials on a Ray cluster, as many at a time as it has
            room for.
        block: wait for the end of all trials. False returns at once.
        detach: if the kernel ends, trials that run go on, and ``attach(sweep.id)`` in another
            kernel goes on with the sweep; trials that have ended are not run again.
        args, kwargs: further arguments of the function, the same in all trials.
        **launch: further arguments of ``notebook_launcher``.

    Returns:
        The sweep: ``.best`` is the run with the best value, ``.runs`` are all runs.

    Raises:
        ConfigError: an argument is invalid, and nothing was started; or no trial has logged
            ``metric``.
        ImportError: the space or the pruner needs Optuna, which is not installed.
        WorkerError: the first of ``max_failures`` failures that are alike.
        LaunchError: a trial could not be started.
        KeyboardInterrupt: the cell was interrupted; all trials were stopped before.

    With ``block=False``, ``sweep.wait()`` raises the errors of trials. Errors that end trials have
    the sweep as ``error.sweep``.

    Example:
        >>> from notebook_accel import Accelerator, sweep
        >>> def train(lr, width):
        ...     Accelerator().log({"loss": lr * width}, step=1)
        ...     return lr, width
        >>> s = sweep(train, {"lr": [0.1, 0.2], "width": [1, 2]}, metric="loss", view="none")
        >>> len(s), s.best[0]
        (4, (0.1, 1))
    """
    asked = {**locals()}
    with show_in_short():
        return _sweep(asked, SweepFolder())


def attach_sweep(sweep_id: str, *, view: str) -> Sweep | None:
    """Go on with a detached sweep of another kernel; None if there is no such sweep."""
    folder = SweepFolder(sweep_id)
    if not folder.has_call:
        return None
    asked = folder.load_call()
    launch = {**asked["launch"], "view": view}
    return _sweep({**asked, "launch": launch, "block": False}, folder)


def _sweep(asked: Mapping[str, Any], folder: SweepFolder) -> Sweep:
    """Check the arguments of ``sweep``, and begin, or go on with what the folder has."""
    function = asked["function"]
    args, kwargs = named_arguments(function, asked["args"], asked["kwargs"] or {})
    launch = {**asked["launch"], "num_processes": as_count("num_processes", asked["num_processes"])}
    launch["engine"] = asked["engine"]
    _check_asked(asked)
    _check_launch(asked["launch"])
    arguments = Arguments(asked, folder)

    for sample in arguments.samples:
        for name in sample:
            if not isinstance(name, str):
                raise ConfigError(
                    f"space: {shown(name)} is no name of an argument: expected a text"
                )
        if twice := [name for name in sample if name in kwargs]:
            raise ConfigError(
                f"{', '.join(twice)}: both in space and in args or kwargs; leave one out"
            )
        check_call(function, args, {**kwargs, **sample})
    view = launch.get("view", "auto")
    choose_view(view)  # for its check alone
    config, _ = resolve(settings_of(launch), launch.get("config"))
    slot = _starting_line(_name_of(function), view)
    with _cleared_by_an_error(slot):
        leases = LEASES[config.engine](config, asked["concurrent"])
        if asked["detach"]:
            folder.hold(asked)
    env = dict(config.env or {})
    if leases.at_a_time > 1 and "OMP_NUM_THREADS" not in {**os.environ, **env}:
        env["OMP_NUM_THREADS"] = str(leases.num_threads)

    call = partial(function, *args, **kwargs)

    def start(chosen: TrialChoice, devices: tuple[int, ...]) -> Run:
        return notebook_launcher(
            function,
            args,
            kwargs={**kwargs, **chosen.arguments},
            config=replace(config, env=env, devices=devices or config.devices),
            block=False,
            detach=asked["detach"],
            view="none",
            name=wording.arguments((), {**chosen.arguments, **chosen.knobs}) or None,
            resume=chosen.resume or None,
            timeout=launch.get("timeout"),
        )

    found: Sweep | None = None
    try:
        with held(), _cleared_by_an_error(slot):
            found = Sweep(call, asked, folder, arguments, leases, start, slot)
        return found.wait() if asked["block"] else found
    except KeyboardInterrupt as error:
        if found is not None:
            found._end_now()
            error.sweep = found  # type: ignore[attr-defined]
            error.run = found.runs[-1] if found.runs else None  # type: ignore[attr-defined]
            error.args = error.args or (_INTERRUPTED,)
        raise


def _name_of(function: Callable[..., Any]) -> str:
    return one_line(str(getattr(function, "__name__", type(function).__name__)), 60)


def _starting_line(name: str, view: str | View) -> DisplaySlot:
    """Return the sweep's slot, with a line in it: devices are counted once torch is imported."""
    slot = DisplaySlot()
    if clicks.find_kernel() is not None and view != "none":
        text = f"sweep of {name}: starting, which takes some seconds the first time"
        slot.show(render_line(text))
    return slot


@contextmanager
def _cleared_by_an_error(slot: DisplaySlot) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if slot.is_placed:
            slot.clear()
        raise


def _check_asked(asked: Mapping[str, Any]) -> None:
    """Refuse arguments of ``sweep`` that are invalid, or do not go together."""
    as_choice("mode", asked["mode"], ["min", "max"])
    as_flag("block", asked["block"])
    as_count("max_failures", asked["max_failures"])
    if asked["concurrent"] is not None:
        as_count("concurrent", asked["concurrent"])
    metric, rounds, engine = asked["metric"], as_count("rounds", asked["rounds"]), asked["engine"]
    if metric is not None and not isinstance(metric, str):
        raise ConfigError(f"metric={shown(metric)}: expected the name of a logged value")
    if rounds > 1 and metric is None:
        raise ConfigError(f"rounds={rounds} needs metric=: a turn ends at a value of it")
    if as_flag("detach", asked["detach"]) and rounds > 1:
        raise ConfigError(f"detach=True with rounds={rounds}: detached trials cannot be paused")
    leases = LEASES[as_choice("engine", engine, [*LEASES])]
    if rounds > 1 and not leases.can_pause:
        raise ConfigError(
            f"engine={engine!r} with rounds={rounds}: a paused trial would keep its place"
        )


def _check_launch(launch: Mapping[str, Any]) -> None:
    known = inspect.signature(notebook_launcher).parameters
    for name in launch:
        if name in _NOT_FOR_TRIALS:
            raise ConfigError(f"sweep() takes no {name}=: each trial is a launch of its own")
        if name not in known:
            meant = wording.did_you_mean(name, [*known, *inspect.signature(sweep).parameters])
            raise ConfigError(f"sweep() got an unexpected argument {name!r}{meant}")
