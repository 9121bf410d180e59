"""The space of a sweep: which arguments each trial gets.

A grid and a list are worked off in their order; distributions are sampled by an Optuna study, which
is told how each trial ended. A pruner needs a study as well, whatever the space.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import product
from typing import TYPE_CHECKING, Any

from notebook_accel.config.checks import as_count, shown
from notebook_accel.errors import ConfigError
from notebook_accel.notebook.sweeps.folder import SweepFolder, TrialChoice, TrialRecord

if TYPE_CHECKING:
    from notebook_accel.notebook.sweeps.trial import Trial

_EXPECTED = (
    'expected a dictionary of lists ({"lr": [0.1, 0.01]}), a list of dictionaries, or a dictionary '
    "of Optuna's distributions"
)


class Arguments:
    """Gives each trial its arguments, and tells the Optuna study, if there is one, of its values.

    Attributes:
        study: the Optuna study; None for a grid or list without a pruner.
        samples: arguments of trials, or stand-ins: one for each set of names.
        num_trials: how many trials there are.
    """

    def __init__(self, asked: Mapping[str, Any], folder: SweepFolder) -> None:
        """Check the space; make the study if one is needed.

        Raises:
            ConfigError: the space is empty or no space, or an argument does not go with it.
            ImportError: Optuna is needed, and is not installed.
        """
        space, metric, num_trials = asked["space"], asked["metric"], asked["num_trials"]
        sampler, pruner = asked["sampler"], asked["pruner"]
        self.study: Any = None
        self._points: list[dict[str, Any]] | None = None
        self._distributions: dict[str, Any] = {}
        self._num_asked = 0
        self._added: deque[TrialChoice] = deque()
        self._adding, self._is_closed = threading.Lock(), False
        if isinstance(space, Mapping) and any(map(_is_distribution, space.values())):
            self._distributions = _checked_distributions(space)
            if num_trials is None:
                raise ConfigError("num_trials is missing: distributions do not end by themselves")
            self.num_trials = as_count("num_trials", num_trials)
            self.samples = [dict.fromkeys(space)]
        else:
            for name, value in (("num_trials", num_trials), ("sampler", sampler)):
                if value is not None:
                    raise ConfigError(
                        f"{name}={shown(value)}: only for a space of Optuna's distributions; a "
                        "grid or list is worked off as it is"
                    )
            self._points = _points(space)
            self.num_trials = len(self._points)
            self.samples = [*{frozenset(point): point for point in self._points}.values()]
        self._unused = iter(self._points or ())
        if self._points is not None and pruner is None:
            return
        if metric is None:
            raise ConfigError("metric is missing: Optuna needs the name of the value to go by")
        try:
            import optuna
        except ImportError:
            raise ImportError(
                "distributions, samplers and pruners of a sweep are Optuna's: pip install optuna"
            ) from None
        from optuna.storages import journal

        folder.make()
        file = journal.JournalFileBackend(str(folder.path / "study.log"))
        # It says in the cell what its file is called, otherwise.
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            storage=optuna.storages.JournalStorage(file),
            study_name=folder.id,
            load_if_exists=True,
            direction="minimize" if asked["mode"] == "min" else "maximize",
            sampler=sampler,
            pruner=optuna.pruners.NopPruner() if pruner is None else pruner,
        )
        optuna.logging.set_verbosity(verbosity)

    @property
    def has_more(self) -> bool:
        """Whether another trial is to be started."""
        return self._num_asked < self.num_trials

    def add(self, chosen: TrialChoice) -> int:
        """Add a trial, of which the study knows nothing; return its number.

        Raises:
            RuntimeError: the sweep has ended.
        """
        with self._adding:
            if self._is_closed:
                raise RuntimeError("the sweep has ended: clone the trial's run, by run.clone()")
            self._added.append(chosen)
            self.num_trials += 1
            return self._num_asked + len(self._added) - 1

    def close(self, *, at_once: bool) -> bool:
        """Take no more trials, unless some that wait are still to begin; return whether it does."""
        with self._adding:
            self._is_closed = at_once or not self.has_more
            return self._is_closed

    def ask(self) -> tuple[TrialChoice, Any]:
        """Return the next trial as chosen, and its Optuna trial or None."""
        self._num_asked += 1
        if self._added:
            return self._added.popleft(), None
        asked: Any = None if self.study is None else self.study.ask(self._distributions)
        if self._points is None:
            return TrialChoice(asked.params, {}), asked
        return TrialChoice(next(self._unused), {}), asked

    def ask_again(self, record: TrialRecord) -> tuple[Any, int, bool]:
        """Note a trial that another kernel began.

        Returns:
            Its Optuna trial (None if the study knows its end), its last step, and whether it was
            pruned.
        """
        self._num_asked += 1
        if record.chosen.origin:
            self.num_trials += 1
        elif self._points is not None:
            next(self._unused)
        if record.asked is None:
            return None, -1, False
        from optuna.trial import Trial as Asked
        from optuna.trial import TrialState

        frozen = self.study.trials[record.asked]
        step = -1 if frozen.last_step is None else frozen.last_step
        if frozen.state.is_finished():
            return None, step, frozen.state == TrialState.PRUNED
        # A file of its own has this study alone: ids are numbers there.
        return Asked(self.study, record.asked), step, False

    def give_up_others(self, records: Sequence[TrialRecord]) -> None:
        """Tell the study that trials which it was asked for, and that never began, have failed."""
        if self.study is None:
            return
        from optuna.trial import TrialState

        began = {record.asked for record in records}
        for each in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if each.number not in began:
                self.study.tell(each.number, state=TrialState.FAIL)

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
        from optuna.trial import TrialState

        if failed or value is None or not math.isfinite(value):
            self.study.tell(asked, state=TrialState.FAIL)
        elif pruned:
            self.study.tell(asked, state=TrialState.PRUNED)
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
    return _with_names(space)


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
    return [_with_names(point) for point in found]


def _choices(name: object, value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(
            f"space: {name}={shown(value)} is no list. What is the same in all trials goes to "
            "kwargs="
        )
    return list(value)


def _with_names(point: Mapping[Any, Any]) -> dict[str, Any]:
    for name in point:
        if not isinstance(name, str):
            raise ConfigError(f"space: {shown(name)} is no name of an argument: expected a text")
    return dict(point)
