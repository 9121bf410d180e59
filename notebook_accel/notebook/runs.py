"""The functions ``runs``, ``find_run``, ``last_run``, ``attach`` and ``compare``.

They find the runs of this process and of earlier ones, and show them as a table, in which each
metric has a column with its last value, and one with its best where its name says what that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from markupsafe import Markup

from notebook_accel.config.checks import as_choice, shown
from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.launch import detached, run_list
from notebook_accel.launch.control.curves import mode_of, plot_together
from notebook_accel.launch.run import Run
from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view.progress import last_values, name_of
from notebook_accel.launch.view.summary import SIGNS, elapsed
from notebook_accel.notebook.clicks import find_kernel
from notebook_accel.notebook.comparison import Charts, best_first, best_of, called, curves_of
from notebook_accel.notebook.sweeps.sweep import attach_sweep
from notebook_accel.notebook.sweeps.trial import in_a_line
from notebook_accel.notebook.views import choose_view
from notebook_accel.render import charts
from notebook_accel.render.markup import element
from notebook_accel.render.snapshot import COLOURS

T = TypeVar("T")
# Metrics with a column; of more those whose name says what is good, then the first ones.
_MAX_METRICS = 8
# Characters of what a run is called, and of an error.
_MAX_LABEL = 60
_MAX_ERROR = 80
# Characters of a cell that is shown whole in a page; trials of a sweep that is opened.
_MAX_SHOWN = 34
_MAX_TRIALS = 200
_CELL = "white-space:nowrap;text-align:left"
_CUT = "max-width:220px;overflow:hidden;text-overflow:ellipsis"
_view_of_past = partial(choose_view, "text")


class _Title(NamedTuple):
    """The title of a column, and whose colour its cells have: "state"'s, or "run" for one each."""

    text: str
    colour: str = ""


class RunTable(list[T]):
    """A list, of runs or of axes, that a notebook shows as a table of runs in their present state.

    ``runs`` are (label, run) pairs; ``names`` the metrics with a column, eight at most (None: all);
    ``sort`` is the metric whose curve is shown (None: the first), ``mode`` says which of its values
    is the best. With ``folds_sweeps`` a sweep is one row, which opens. ``nothing`` is shown where
    there are no runs.
    """

    def __init__(
        self,
        items: Iterable[T],
        runs: Sequence[tuple[str, Run]],
        names: Sequence[str] | None = None,
        sort: str | None = None,
        mode: str | None = None,
        *,
        folds_sweeps: bool = False,
        nothing: str = "[]",
    ) -> None:
        super().__init__(items)
        self._folds_sweeps = folds_sweeps
        self._nothing = nothing
        self._runs = runs
        self._names = names
        self._sort = sort
        self._mode = mode

    def _groups(self) -> list[list[tuple[str, Run]]]:
        """Return the runs, those of a sweep together, where the first of them stands."""
        groups: dict[str, list[tuple[str, Run]]] = {}
        for label, run in self._runs:
            trial = run.state.trial if self._folds_sweeps else None
            groups.setdefault(trial.sweep if trial else run.id, []).append((label, run))
        return [*groups.values()]

    def _is_sweep(self, group: Sequence[tuple[str, Run]]) -> bool:
        return self._folds_sweeps and group[0][1].state.trial is not None

    def _columns(self, runs: Sequence[tuple[str, Run]]) -> list[tuple[_Title, list[str]]]:
        """Return titles and cells; columns that say nothing new are left out."""
        logged = dict.fromkeys(name for _, run in runs for name in last_values(run.state))
        # What a library keeps beside, such as its times, shall not take the place of a loss.
        by_use = sorted(logged, key=lambda name: mode_of(name) is None)
        names = list(by_use if self._names is None else self._names)
        if self._sort is not None:
            names = [self._sort, *(name for name in names if name != self._sort)]
        modes = {name: mode_of(name) for name in names[:_MAX_METRICS]}
        if self._sort is not None and self._mode is not None:
            modes[self._sort] = self._mode
        head = [_Title("run"), _Title("state", "state"), _Title("took"), _Title("arguments")]
        # What went wrong has a place where a page of ordinary width shows it.
        head.append(_Title("error", "state"))
        head += [_Title(f"{best}{name_of(name)}") for name in modes for best in ("", "best ")]
        head += [_Title(f"{name_of(next(iter(modes), ''))} curve", "run")]
        head += map(_Title, ("started", "notebook", "id"))
        rows = [_facts(label, run, modes) for label, run in runs]
        columns = zip(head, *rows, strict=True)
        said = [(title, cells) for title, *cells in columns if any(cells)]
        # Trials of a sweep are called by their arguments.
        return said[:1] + [column for column in said[1:] if column[1] != said[0][1]]

    def __repr__(self) -> str:
        if not self._runs:
            return self._nothing
        groups = self._groups()
        columns = self._columns([group[0] for group in groups if not self._is_sweep(group)])
        rows = zip(*([title.text, *cells] for title, cells in columns), strict=True)
        head, *lines = wording.aligned([[*row] for row in rows]) if columns else [""]
        rest = iter(lines)
        found = [_about(each) if self._is_sweep(each) else next(rest) for each in groups]
        return "\n".join([head, *found] if head else found)

    def _repr_html_(self) -> str | None:
        return self.html() if self._runs else None

    def html(self, *, is_live: bool = False) -> str:
        """Return the table; that below live charts is drawn by their style sheet."""
        # It scrolls where it is wider than the page: cells of several lines made rows too high.
        return str(element("div", self._table("" if is_live else _CELL), style="overflow-x:auto"))

    def _table(self, cell: str) -> Markup:
        groups = self._groups()
        columns = self._columns([group[0] for group in groups if not self._is_sweep(group)])
        lines: list[Markup] = []
        index = 0
        for group in groups:
            if self._is_sweep(group):
                lines.append(self._folded(group, max(1, len(columns))))
                continue
            colours = {
                "state": COLOURS.get(group[0][1].status),
                "run": charts.COLOURS[index % len(charts.COLOURS)],
            }
            cells = []
            for title, texts in columns:
                text, colour = texts[index], colours.get(title.colour)
                is_long = len(text) > _MAX_SHOWN
                parts = _CUT if is_long and cell else "", cell, f"color:{colour}" if colour else ""
                style = ";".join(filter(None, parts)) or None
                cells.append(element("td", text, style=style, title=text if is_long else None))
            lines.append(element("tr", *cells))
            index += 1
        heads = (element("th", title.text, style=cell or None) for title, _ in columns)
        return element(
            "table",
            element("thead", element("tr", *heads)),
            element("tbody", *lines),
            class_=None if cell else "na-runs",
            style="margin:0;font-size:12px",
        )

    def _folded(self, trials: Sequence[tuple[str, Run]], num_columns: int) -> Markup:
        hidden = len(trials) - _MAX_TRIALS
        rest = f"{hidden:,} more trials" if hidden > 0 else ""
        table = RunTable[Run]([], trials[:_MAX_TRIALS], self._names, self._sort, self._mode)
        details = element("details", element("summary", _about(trials)), table._table(_CELL), rest)
        return element("tr", element("td", details, colspan=num_columns, style=_CELL))


def _about(trials: Sequence[tuple[str, Run]]) -> str:
    """Return how a sweep stands: its name, its trials, and the best of them."""
    states = [run.state for _, run in trials]
    of = [state.trial for state in states if state.trial is not None]
    num = max(trial.number for trial in of) + 1
    parts = [f"{num:,} trial{'s' * (num > 1)}"]
    counts = {
        "of them here": len(trials) if len(trials) < num else 0,
        "failed": sum(state.status == "failed" for state in states),
        "stopped": sum(state.status == "stopped" for state in states),
        "going on": sum(not state.has_ended for state in states),
    }
    parts += [f"{number} {what}" for what, number in counts.items() if number]
    name, metric, mode = of[0].name, of[0].metric or "", of[0].mode
    values = [
        (curve.last, run.state.arguments)
        for _, run in trials
        if (curve := curves_of(run).get(metric)) is not None
        and run.status != "failed"
        and math.isfinite(curve.last)
    ]
    if values:
        value, arguments = min(values) if mode == "min" else max(values)
        about = one_line(arguments, _MAX_LABEL)
        parts.append(f"best {name_of(metric)} {wording.number(value)} ({about})")
    return f"sweep of {name}: {', '.join(parts)}"


def _facts(label: str, run: Run, modes: Mapping[str, str | None]) -> list[str]:
    state = run.state
    last, curves = last_values(state), curves_of(run)
    values = []
    for name, mode in modes.items():
        best = best_of(curves.get(name), mode)
        values += [last.get(name, ""), "" if best is None else wording.number(best)]
    failure, first = state.failure, curves.get(next(iter(modes), ""))
    return [
        one_line(label, _MAX_LABEL),
        f"{SIGNS.get(state.status, '●')} {state.status}",
        wording.span(elapsed(state, state.now())),
        state.arguments,
        one_line(in_a_line(failure.traceback, failure.message), _MAX_ERROR) if failure else "",
        *values,
        "" if first is None else charts.sparkline(first.points()),
        wording.moment(state.started),
        state.notebook,
        state.run,
    ]


def find_run(run_id: str) -> Run:
    """Return the run with an id: a run of this process, or one that another process left on disk.

    Args:
        run_id: ``run.id``, the name of the run's folder.

    Raises:
        NotebookAccelError: there is no such run, or it was deleted.
        LaunchError: the run is not of this process, and this user has no folder for runs.

    Example:
        >>> from notebook_accel import find_run, notebook_launcher
        >>> run = notebook_launcher(abs, (-1,), num_processes=1)
        >>> find_run(run.id).status
        'succeeded'
    """
    return run_list.find_run(run_id, view=_view_of_past)


def attach(run_id: str, *, view: str = "auto") -> Any:
    """Return the handle of a detached run (``notebook_launcher(..., block=False, detach=True)``).

    With the id of a detached sweep, go on with that, and return its ``Sweep``.

    It is meant for a new kernel, after the one that launched the run. A run that still goes on is
    shown live, and its Stop button works. The handle of a run that has ended has its results, logs
    and metrics.

    Args:
        run_id: ``run.id``, which ``runs(everywhere=True)`` shows too.
        view: as in ``notebook_launcher``.

    Raises:
        NotebookAccelError: there is no such run, or it was not detached.
        LaunchError: this user has no folder for runs.

    Example:
        >>> from notebook_accel import attach, notebook_launcher
        >>> run = notebook_launcher(abs, (-1,), num_processes=1, block=False, detach=True)
        >>> again = attach(run.id).wait()
        >>> again[0]
        1
    """
    found = attach_sweep(run_id, view=view)
    if found is not None:
        return found
    live = partial(choose_view, view, waits=False)
    return detached.attach(run_id, view=live, view_of_past=_view_of_past)


def last_run() -> Run:
    """Return the newest run of this process, even if it failed or was interrupted.

    A launch that raises returns no run: in ``run = notebook_launcher(...)``, ``run`` keeps its old
    value.

    Raises:
        NotebookAccelError: this process has launched no run.

    Example:
        >>> from notebook_accel import last_run, notebook_launcher
        >>> _ = notebook_launcher(abs, (-1,), num_processes=1, name="absolute")
        >>> last_run().name, last_run().results
        ('absolute', [1])
    """
    here = runs()
    if not here:
        raise NotebookAccelError(
            "this process has launched no run yet; runs(everywhere=True) lists those of earlier "
            "ones, and find_run(id) opens one"
        )
    return here[-1]


def runs(
    *, everywhere: bool = False, sort: str | None = None, mode: str | None = None
) -> RunTable[Run]:
    """Return the runs of this process, the newest last, failed and interrupted ones too.

    A notebook shows the list as a table, with the last and the best value of each metric; a sweep
    is one row of it, with its best trial, and opens. The list has all trials. Results
    are kept as long as something refers to the handle that the launch returned, and unread ones of
    the newest run until the next launch; else a run has logs, metrics and state only. A launch that
    raised returned no handle; the newest few of these runs keep their results.

    Args:
        everywhere: also return the runs that other processes and earlier kernels left on disk; all
            are in the order of their starts.
        sort: name of a metric; the run with its best value comes first, and those that failed or
            have no value last.
        mode: whether the best value is the lowest ("min") or the highest ("max"). None: "max" for
            names such as "accuracy" or "eval/f1", else "min".

    Raises:
        ConfigError: no run has logged ``sort``, or ``mode`` is neither.
        LaunchError: ``everywhere`` is True, and this user has no folder for runs.

    Example:
        >>> from notebook_accel import notebook_launcher, runs
        >>> run = notebook_launcher(abs, (-1,), num_processes=1)
        >>> runs()[-1].id == run.id
        True
    """
    found = run_list.runs(everywhere=everywhere, view=_view_of_past)
    if mode is not None:
        as_choice("mode", mode, ["min", "max"])
    if sort is not None:
        curves = {run.id: curves_of(run) for run in found}
        if found and not any(sort in each for each in curves.values()):
            logged = dict.fromkeys(name for each in curves.values() for name in each)
            listed = ", ".join(map(repr, logged)) or "nothing"
            raise ConfigError(f"sort={shown(sort)}: no run has logged it; they logged {listed}")
        mode = mode or mode_of(sort) or "min"
        best = {name: best_of(each.get(sort), mode) for name, each in curves.items()}
        found = best_first(
            found, lambda run: None if run.status == "failed" else best[run.id], mode
        )
    labelled = [(run.name, run) for run in found]
    others = "; runs(everywhere=True) lists those of other kernels, too"
    nothing = f"[]  (no run yet{'' if everywhere else others})"
    return RunTable(found, labelled, sort=sort, mode=mode, folds_sweeps=True, nothing=nothing)


def compare(
    *runs: Run | Sequence[Run] | Mapping[str, Run],
    names: Sequence[str] = (),
    backend: str | None = None,
) -> Any:
    """Draw the metrics of several runs together: one chart per metric, one colour per run.

    In a notebook the charts are those of the panel, with a table of the runs below, and follow runs
    that still train. Of more than ten runs the best is in colour. Runs are called by their names
    (``notebook_launcher(..., name="lr 0.1")``) and the arguments that differ.

    Args:
        *runs: the runs: one after the other, as a list, or as a mapping whose keys are the labels.
            Runs of ``runs(everywhere=True)`` work too.
        names: the metrics to draw, in this order. If empty, all metrics in the order in which they
            were first logged: those of the first run, then further ones of the next run, and so on.
            The panel's charts are the first six.
        backend: "matplotlib" draws all metrics by that, as do terminals and plain Python. None: the
            panel's charts in a notebook.

    Returns:
        What a notebook shows as the charts, as the value of a cell or by ``display``. By
        matplotlib: a list of its axes, one for each metric, in the same order, which a notebook
        shows as a table of the runs.

    Raises:
        ConfigError: no run was given, something given is no run, ``names`` is a text, no run has a
            metric with one of the names, or ``backend`` is another one.
        FileNotFoundError: a run was deleted from disk.
        ImportError: matplotlib is needed, and not installed.

    Example:
        >>> from notebook_accel import Accelerator, compare, notebook_launcher
        >>> def train(rate):
        ...     Accelerator().log({"loss": rate}, step=1)
        >>> slow = notebook_launcher(train, (0.1,), num_processes=1)
        >>> fast = notebook_launcher(train, (0.2,), num_processes=1)
        >>> charts = compare({"slow": slow, "fast": fast})
    """
    labelled = _labelled(runs)
    if isinstance(names, str):
        raise ConfigError(f"names={shown(names)}: expected a list, such as names=[{shown(names)}]")
    if backend is not None:
        as_choice("backend", backend, ["matplotlib"])
    elif find_kernel() is not None:
        by_name = called(labelled)
        table: RunTable[Any] = RunTable([], [*by_name.items()], names or None)
        return Charts(by_name, names, of="these runs", table=table)
    metrics = {label: run.metrics for label, run in labelled}
    return RunTable(plot_together(metrics, names, charts.COLOURS), labelled, names or None)


def _labelled(runs: Sequence[Any]) -> list[tuple[str, Run]]:
    """Return (label, run) pairs; ConfigError for no run, or for what is none."""
    given = runs[0] if len(runs) == 1 and isinstance(runs[0], (list, tuple, Mapping)) else runs
    found = [*given.values()] if isinstance(given, Mapping) else [*given]
    wrong = [run for run in found if not isinstance(run, Run)]
    if wrong or not found:
        what = shown(wrong[0]) if wrong else "nothing"
        raise ConfigError(
            f"compare() got {what}: expected runs, as compare(run1, run2), "
            'compare(notebook_accel.runs()[-3:]) or compare({"lr 0.1": run1, "lr 0.2": run2})'
        )
    if isinstance(given, Mapping):
        return [(str(label), run) for label, run in given.items()]
    all_names = [run.name for run in found]
    return [
        (run.name if all_names.count(run.name) == 1 else f"{run.name} ({run.id})", run)
        for run in found
    ]
