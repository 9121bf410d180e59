"""Which arguments and which devices each trial of a sweep gets.

A grid and a list are worked off in their order; distributions are sampled by an Optuna study, which
is told how each trial ended. A pruner needs a study as well, whatever the space.

A trial gets accelerators that no run of this kernel uses, unless it is to share. On a Ray cluster,
Ray chooses them; a trial begins when there is room for all its ranks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from copy import copy
from functools import cached_property
from itertools import product
from typing import Any

from notebook_accel.config import LaunchConfig
from notebook_accel.config.checks import as_count, check_enough, shown
from notebook_accel.errors import ConfigError
from notebook_accel.launch import run_list
from notebook_accel.launch.engines.ray import num_places
from notebook_accel.launch.preflight import look_at_machine
from notebook_accel.launch.rank_environment import VISIBLE_OF_KIND
from notebook_accel.notebook.sweeps.trial import SweepFolder, Trial, TrialChoice

_EXPECTED = (
    'expected a dictionary of lists ({"lr": [0.1, 0.01]}), a list of dictionaries, or a dictionary '
    "of Optuna's distributions"
)


class Arguments:
    """Gives each trial its arguments, and tells the Optuna study, if there is one, of its values.

    Attributes:
        samples: arguments of trials, or stand-ins: one for each set of names.
    """

    def __init__(self, asked: Mapping[str, Any], folder: SweepFolder) -> None:
        """Check the space.

        Raises:
            ConfigError: the space is empty or no space, or an argument does not go with it.
            ImportError: Optuna is needed, and is not installed.
        """
        space, metric, num_trials = asked["space"], asked["metric"], asked["num_trials"]
        sampler, pruner = asked["sampler"], asked["pruner"]
        self._asked, self._folder = asked, folder
        self._optuna: Any = None
        # The trials that are still to begin; None for one that the study samples.
        self._planned: list[TrialChoice | None]
        self._distributions: dict[str, Any] = {}
        self._num_asked = 0
        # Numbers in the study of the trials that have begun.
        self._began: set[int | None] = set()
        self._adding, self._is_closed = threading.Lock(), False
        if isinstance(space, Mapping) and any(map(_is_distribution, space.values())):
            self._distributions = _checked_distributions(space)
            if num_trials is None:
                raise ConfigError("num_trials is missing: distributions do not end by themselves")
            self._planned = [None] * as_count("num_trials", num_trials)
            self.samples = [dict.fromkeys(space)]
        else:
            for name, value in (("num_trials", num_trials), ("sampler", sampler)):
                if value is not None:
                    raise ConfigError(
                        f"{name}={shown(value)}: only for a space of Optuna's distributions; a "
                        "grid or list is worked off as it is"
                    )
            points = _points(space)
            self._planned = [TrialChoice(point, {}) for point in points]
            self.samples = [*{frozenset(point): point for point in points}.values()]
            if pruner is None:
                return
        if metric is None:
            raise ConfigError("metric is missing: Optuna needs the name of the value to go by")
        try:
            import optuna
        except ImportError:
            raise ImportError(
                "distributions, samplers and pruners of a sweep are Optuna's: pip install optuna"
            ) from None
        self._optuna = optuna

    @cached_property
    def study(self) -> Any:
        """The Optuna study; None for a grid or list without a pruner.

        It is made when it is first asked for: a sweep that is refused leaves no folder.
        """
        optuna, asked, folder = self._optuna, self._asked, self._folder
        if optuna is None:
            return None
        backend = optuna.storages.journal.JournalFileBackend
        folder.make()
        file = backend(str(folder.path / "study.log"))
        # It says in the cell what its file is called, otherwise.
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(file),
            study_name=folder.id,
            load_if_exists=True,
            direction="minimize" if asked["mode"] == "min" else "maximize",
            sampler=asked["sampler"],
            pruner=asked["pruner"] or optuna.pruners.NopPruner(),
        )
        optuna.logging.set_verbosity(verbosity)
        return study

    @property
    def has_more(self) -> bool:
        """Whether another trial is to be started."""
        return bool(self._planned)

    @property
    def num_trials(self) -> int:
        return self._num_asked + len(self._planned)

    def add(self, clone: TrialChoice) -> int:
        """Add a trial, which begins before all but earlier clones; return its number.

        Raises:
            RuntimeError: the sweep has ended.
        """
        with self._adding:
            if self._is_closed:
                raise RuntimeError("the sweep has ended: clone the trial's run, by run.clone()")
            place = sum(each is not None and bool(each.origin) for each in self._planned)
            self._planned.insert(place, clone)
            return self._num_asked + place

    def close(self, *, at_once: bool) -> bool:
        """Take no more trials, unless some that wait are still to begin; return whether it does."""
        with self._adding:
            self._is_closed = at_once or not self.has_more
            return self._is_closed

    def ask(self) -> tuple[TrialChoice, Any]:
        """Return the next trial as chosen, and its Optuna trial or None."""
        with self._adding:
            planned = self._planned.pop(0)
            self._num_asked += 1
        # A study knows nothing of clones.
        if planned is not None and (self.study is None or planned.origin):
            return planned, None
        asked = self.study.ask(self._distributions)
        arguments = asked.params if planned is None else planned.arguments
        return TrialChoice(arguments, {}, asked=asked.number), asked

    def ask_again(self, chosen: TrialChoice) -> tuple[Any, dict[str, Any]]:
        """Note a trial that another kernel began.

        Returns:
            Its Optuna trial (None if the study knows its end), and what the study knows of it, by
            the names that ``Trial`` has for that.
        """
        self._num_asked += 1
        if not chosen.origin:
            self._planned.pop(0)
        if chosen.asked is None:
            return None, {}
        self._began.add(chosen.asked)
        frozen, trials = self.study.trials[chosen.asked], self._optuna.trial
        known = {
            "last_step": -1 if frozen.last_step is None else frozen.last_step,
            "pruned": frozen.state == trials.TrialState.PRUNED,
        }
        # A file of its own has this study alone: ids are numbers there.
        is_over = frozen.state.is_finished()
        return None if is_over else trials.Trial(self.study, chosen.asked), known

    def give_up_others(self) -> None:
        """Tell the study that trials which another kernel asked for and never began have failed."""
        if self.study is None:
            return
        states = self._optuna.trial.TrialState
        for each in self.study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            if each.number not in self._began:
                self.study.tell(each.number, state=states.FAIL)

    def should_prune(self, trial: Trial, *, after_turn: bool = False) -> bool:
        """Return whether the pruner ends a trial by its newest report."""
        if trial.asked is None:
            return False
        if not after_turn:
            return bool(trial.asked.should_prune())
        frozen = self.study.get_trials(deepcopy=False)[trial.asked.number]
        return bool(self.study.pruner.prune(_in_turns(self.study), frozen))

    def tell(self, asked: Any, value: float | None, *, pruned: bool, failed: bool) -> None:
        """Tell the study how a trial ended; a value that is not finite is a failure there."""
        if asked is None:
            return
        states = self._optuna.trial.TrialState
        if failed or value is None or not math.isfinite(value):
            self.study.tell(asked, state=states.FAIL)
        elif pruned:
            self.study.tell(asked, state=states.PRUNED)
        else:
            self.study.tell(asked, value)


def _in_turns(study: Any) -> Any:
    """Return a study whose trials that go on count as complete: most pruners look at no others."""
    from optuna.trial import TrialState

    def get_trials(deepcopy: bool = True, states: Any = None) -> list[Any]:  # noqa: ARG001
        found = [copy(each) for each in study.get_trials(deepcopy=False)]
        for each in found:
            if each.state == TrialState.RUNNING and each.intermediate_values:
                each.state = TrialState.COMPLETE
        return [each for each in found if states is None or each.state in states]

    seen = copy(study)
    seen.get_trials = get_trials
    return seen


def _is_distribution(value: Any) -> bool:
    """Return whether a value is a distribution of Optuna, which need not be installed."""
    return any(kind.__name__ == "BaseDistribution" for kind in type(value).__mro__)


def _checked_distributions(space: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in space.items():
        if not _is_distribution(value):
            raise ConfigError(
                f"space: {name}={shown(value)} is no distribution, and others are. For a list take "
                "optuna.distributions.CategoricalDistribution([...]); what is the same in all "
                "trials goes to kwargs="
            )
    return dict(space)


def _points(space: Any) -> list[dict[str, Any]]:
    """Return the arguments of all trials of a grid or list, in their order."""
    if isinstance(space, Mapping):
        values = {name: _choices(name, value) for name, value in space.items()}
        found = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
        found = found if values else []
    elif isinstance(space, (list, tuple)) and all(isinstance(one, Mapping) for one in space):
        found = [dict(one) for one in space]
    else:
        raise ConfigError(f"space={shown(space)}: {_EXPECTED}")
    if not found:
        raise ConfigError(f"space={shown(space)} has no trial: {_EXPECTED}")
    return found


def _choices(name: object, value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(
            f"space: {name}={shown(value)} is no list. What is the same in all trials goes to "
            "kwargs="
        )
    return list(value)


# ---- devices ------------------------------------------------------------------------------


class Leases:
    """The accelerators or cores of a sweep, of which each trial gets ``num_processes``.

    Attributes:
        at_a_time: how many trials fit at a time.
        awaited: the runs that use what a trial waits for; "" while none waits.
        can_pause: whether a paused trial leaves its place to another one.
    """

    can_pause = True

    def __init__(self, config: LaunchConfig, concurrent: int | None) -> None:
        """Count the accelerators.

        Args:
            config: settings of each trial's launch.
            concurrent: how many trials at a time; None for as many as fit. More than fit share.

        Raises:
            ConfigError: a trial needs more accelerators than there are.
        """
        self._ranks = config.num_processes or 1
        self._devices: tuple[int, ...] = ()
        machine = look_at_machine()
        on_cpu = config.devices == "cpu" or not machine.found.names
        if on_cpu:
            fit = max(1, machine.num_cores // self._ranks)
        else:
            chosen = config.devices
            found = machine.found
            every = tuple(range(len(found.names)))
            devices = chosen if isinstance(chosen, tuple) else every
            check_enough(self._ranks, len(devices), f"each trial can have {len(devices)} at most")
            # Others cannot be told which of their devices to use.
            can_choose = found.kind == "cuda" or found.kind in VISIBLE_OF_KIND
            self._devices = devices if can_choose else ()
            fit = len(devices) // self._ranks if can_choose else 1
        self.awaited = ""
        self._shares = concurrent is not None and concurrent > fit
        self.at_a_time = concurrent or fit
        self.num_threads = max(1, machine.num_cores // (self.at_a_time * self._ranks))

    def take(self, own: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        """Return the accelerators of a trial; () if it needs no choice; None if none are free.

        The caller holds ``run_list.choosing`` until the trial is launched, or goes on; its end or
        pause frees them.

        Args:
            own: those of a paused trial, which are the only ones that it can go on with.
        """
        among, number = (self._devices, self._ranks) if own is None else (own, len(own))
        taken, users = run_list.least_used(among, number)
        self.awaited = "" if self._shares else ", ".join(dict.fromkeys(run.name for run in users))
        return None if self.awaited else taken


class RayLeases(Leases):
    """The places of a Ray cluster."""

    # A paused trial would keep its place.
    can_pause = False

    def __init__(self, config: LaunchConfig, concurrent: int | None) -> None:
        """Count the places.

        Raises:
            ConfigError: a trial needs more than there are.
            LaunchError: Ray is not installed.
        """
        self._config, self._ranks = config, config.num_processes or 1
        total, _ = num_places(config)
        if self._ranks > total:
            raise ConfigError(
                f"num_processes={self._ranks}, and the Ray cluster has room for {total} ranks"
            )
        self.at_a_time = concurrent or total // self._ranks
        self.awaited, self.num_threads = "", 1

    def take(self, own: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        has_room = num_places(self._config)[1] >= self._ranks
        self.awaited = "" if has_room else "others on the Ray cluster"
        return () if has_room else None


# By the name of the engine.
LEASES: dict[str, type[Leases]] = {"auto": Leases, "local": Leases, "ray": RayLeases}
