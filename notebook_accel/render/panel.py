"""The live panel as HTML, except metrics and log: pure functions of the run's state.

The panel is drawn five times a second, at which rate a page keeps up with messages of 20 KB
(notebook/views.py). So long texts are cut. Of more than 16 ranks, each has a small cell in one
row (the heat row), the slowest first, and only the slowest few have a row of their own as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from markupsafe import Markup

from notebook_accel.launch.control.run_state import RankState, RunState
from notebook_accel.launch.text import wording
from notebook_accel.launch.view import progress, summary
from notebook_accel.launch.view.step_times import step_lines, step_table
from notebook_accel.render.markup import element, join, pick_script, shorten

# Of a bar's name, which has room for some 18 letters in its column, and of a line for the person.
_LABEL_BYTES, _NOTICE_BYTES = 60, 600
# After so long a line says that ranks are waited for, and the panel's button stops them again.
STOP_SECONDS = 1.5
# Different stacks; less of each is shown the more there are.
_MAX_STACKS = 8
# As many ranks have a row each; of more, the slowest.
_MAX_ROWS = 16
_NUM_SLOWEST = 6
# Of so many ranks each nested bar has a row of its own; of more it is a thin line in the row of its
# rank. How many ranks there are never changes, unlike how many bars are open.
_MAX_RANKS_WITH_ROWS_OF_BARS = 4


# When the ranks stood there; the ranks of each stack, and its text.
AskedStacks: TypeAlias = "tuple[str, Sequence[tuple[Sequence[int], str]]]"


def render_panel(
    state: RunState,
    throughputs: Mapping[int, float | None] = MappingProxyType({}),
    *,
    last_hang: str = "",
    picked: int | None = None,
    stopping: float = 0.0,
    grace: float = 0.0,
) -> Markup:
    """Return ranks, notices and warnings; that of a hang stays: no panel jumps under the mouse.

    Args:
        throughputs: batches or steps per second of each rank; None where not known yet.
        last_hang: the newest hang's text, also after it is over; "" if there was none.
        picked: the rank whose output is in the log; None for all.
        stopping: seconds since the run was asked to stop.
        grace: seconds that ranks have after Stop until they are interrupted.
    """
    warned: list[Markup] = []
    if state.hang is not None:
        kind = "na-hang" if state.hang.is_certain else "na-waiting"
        warned.append(element("div", shorten(summary.hang_line(state), 800), class_=kind))
    elif last_hang:
        text = f"The run goes on. Before that: {last_hang}"
        warned.append(element("div", shorten(text, 800), class_="na-muted"))
    if stopping > STOP_SECONDS:
        line = (
            "Waiting for the ranks to finish their step and leave. Stop again interrupts them, and "
            f"ends them {grace:g} s later. Kill ends them now, and results are lost."
        )
        warned.append(element("div", line, class_="na-waiting"))
    notices = [element("div", shorten(text, _NOTICE_BYTES)) for text in state.notices[-4:]]
    parts = [_ranks(state, throughputs, picked), _steps(state)]
    parts += [element("div", *notices, class_="na-notices")] if notices else []
    parts += [element("div", *warned, class_="na-warnings")] if warned else []
    return element("div", *parts, class_="na")


def render_title(state: RunState, now: float, of_run: tuple[float, str] | None = None) -> Markup:
    """Return the panel's title bar as HTML: name, status, time, ranks, devices and rate.

    Args:
        now: wall time in seconds.
        of_run: mean items per second of one rank, and their unit, such as "step".
    """
    about = summary.on_what(state) or summary.num_ranks(state)
    parts = [element("span", about, title=about)]
    if of_run is not None and state.status == "running":
        of_what = "of a rank, in the mean of all and of the last seconds"
        parts.append(element("span", wording.rate(*of_run), title=of_what))
    # Where it has no room it is left out.
    best = element("span", summary.best_value(state), class_="na-best")
    name = element(
        "div",
        element("span", class_=f"na-dot na-{state.status}"),
        element("b", shorten(state.name, 60), title=shorten(state.name, 90)),
        element("span", state.status, class_=f"na-status na-{state.status}"),
        element("span", wording.clock(summary.elapsed(state, now)), class_="na-muted na-clock"),
    )
    return element(
        "div",
        name,
        element("div", element("div", *parts), best, class_="na-muted na-facts"),
        class_="na na-title",
    )


def render_alert(state: RunState) -> Markup:
    """Return what screen readers read, apart from what is redrawn each second; "" for none."""
    if state.status == "stopping":
        text = f"{state.name}: waiting for the ranks to leave"
    elif state.hang is not None:
        text = f"{state.name}: {state.hang.text}"
    else:
        return Markup("")
    return element("div", shorten(text, 800), role="alert")


def fold_of_stacks(
    title: str,
    stacks: Sequence[tuple[Sequence[int], str]],
    *,
    is_open: bool = False,
    max_bytes: int = 30_000,
    style: str | None = None,
) -> Markup:
    """Return (ranks, stack) pairs in ``<details>``, each cut to its share of the bytes."""
    share = max(500, max_bytes // max(1, min(len(stacks), _MAX_STACKS)))
    parts = [
        element(
            "div",
            element("b", wording.rank_list(ranks)),
            element("pre", shorten(text.strip("\n"), share), style=style),
        )
        for ranks, text in stacks[:_MAX_STACKS]
    ]
    if len(stacks) > _MAX_STACKS:
        parts.append(element("div", f"… and {len(stacks) - _MAX_STACKS} more", class_="na-muted"))
    return element("details", element("summary", title), *parts, open=is_open)


def render_warnings(state: RunState) -> Markup:
    """Return Python's warnings of all ranks in a fold; "" for none."""
    lines = [element("div", line) for line in summary.warning_lines(state)]
    title = element("summary", summary.num_warnings(state))
    return element("details", title, *lines, class_="na-python") if lines else Markup("")


def render_steps(state: RunState, **styles: str) -> Markup:
    """Return where the time of steps goes; "" if unknown. ``styles`` is CSS of "table", "tr"..."""
    rows: list[Markup] = []
    for cells in step_table(state):
        tag = "td" if rows else "th"
        parts = (element(tag, text, style=styles.get(tag)) for text in cells)
        rows.append(element("tr", *parts, style=styles.get("tr")))
    return element("table", *rows, style=styles.get("table")) if rows else Markup("")


# ---- ranks ---------------------------------------------------------------------------------

_COLUMNS = (
    ("rank", "rank"),
    ("state", "state"),
    ("label", ""),
    ("bar", "progress"),
    ("count", ""),
    ("rate", "rate"),
    ("left", "left"),
    ("step", "step"),
    ("load", "cpu"),
    ("memory", "memory"),
)
# Before the two last ones, where ranks have devices of which anything is known.
_DEVICE_COLUMNS = (("use", "gpu"), ("device", "gpu mem"))
# What a word for a state means, where that is not said by the word.
_MEANINGS = {
    "quiet": "it has made no step and printed nothing since",
    "waits": "it waits for other ranks",
    "elsewhere": "other ranks wait for it",
    "suspended": "SIGSTOP or a debugger holds its process",
    "lost peer": "it lost its connection to a rank that failed",
    "not asked": "the call is not meant for it",
}
# A cell of the heat row picks its rank in the list above the log.
_PICK = pick_script("i", "r.textContent", "na-rank-filter")


def _ranks(state: RunState, throughputs: Mapping[int, float | None], picked: int | None) -> Markup:
    shown, rest = list(state.ranks), ""
    parts: list[Markup] = []
    if len(shown) > _MAX_ROWS:
        ordered = summary.slowest_first(state)
        cells = [_heat_cell(rank, state) for rank in ordered]
        parts.append(
            element("div", *cells, class_="na-heat", aria_hidden="true", onmousedown=_PICK)
        )
        shown = ordered[:_NUM_SLOWEST]
        if picked is not None and all(rank.rank != picked for rank in shown):
            shown = [state.ranks[picked], *shown[:-1]]
        status_of = lambda rank: summary.live_condition(rank, state).replace("waits", "waiting")  # noqa: E731
        rest = summary.hidden_ranks(state.ranks, shown, status_of)
    is_of_device = any(one.device_use is not None or one.device_memory for one in state.ranks)
    columns = [*_COLUMNS[:-2], *(_DEVICE_COLUMNS if is_of_device else ()), *_COLUMNS[-2:]]
    rows: list[Markup] = []
    for rank in shown:
        throughput = throughputs.get(rank.rank)
        first, *inner = progress.progress_lines(rank, throughput=throughput)
        if state.world_size <= _MAX_RANKS_WITH_ROWS_OF_BARS:
            rows.append(_row(state, rank, first, [], columns))
            rows += [_inner_row(rank, line) for line in inner]
            # An inner bar that is over keeps its row for the next one.
            blank = _inner_row(rank, None)
            rows += [blank] * (progress.most_lines(rank) - 1 - len(inner))
        else:
            rows.append(_row(state, rank, first, inner, columns))
    heads = [element("th", title, scope="col", class_=f"na-c-{name}") for name, title in columns]
    head = element("thead", element("tr", *heads))
    class_ = "na-ranks na-of-device" if is_of_device else "na-ranks"
    parts.append(element("table", head, element("tbody", *rows), class_=class_))
    if rest:
        parts.append(element("div", f"slowest first, {rest}", class_="na-fold na-muted"))
    return join(parts)


def _row(
    state: RunState,
    rank: RankState,
    line: progress.ProgressLine,
    inner: Sequence[progress.ProgressLine],
    columns: Sequence[tuple[str, str]],
) -> Markup:
    """``line`` is the outermost bar or the steps; each of ``inner`` is a thin bar below it."""
    status = summary.live_condition(rank, state)
    kind_of_label = ""
    if not rank.bars and rank.steps:
        # How many steps has a column of its own.
        line = replace(line, label="batches" if rank.batches else "steps")
    if status in ("waits", "elsewhere") and state.hang is not None:
        where = state.hang.elsewhere.get(rank.rank) or f"in {state.hang.operations[rank.rank]}"
        line = replace(line, label=where)
        kind_of_label = " na-in"
    is_wide = bool(kind_of_label) and not line.fraction and not inner
    shown = {"succeeded": "done"}.get(status, status)
    if status == "quiet" and rank.quiet_since is not None:
        shown = f"quiet {wording.clock(state.now() - rank.quiet_since)}"
    logged = (step for step, _ in rank.metrics.values() if step is not None)
    # The optimizer steps, or else the highest step logged.
    step = rank.steps or max(logged, default=0)
    texts = {
        "bar": join(_bar(rank, line, "") for line in (line, *inner)),
        "count": line.count,
        "rate": line.rate,
        "left": line.remaining,
        "step": wording.count(step) if step else "",
        "use": _percent(rank, rank.device_use),
        "device": _memory(rank.device_memory),
        "load": _percent(rank, rank.cpu),
        "memory": _memory(rank.memory),
    }
    # Where a rank waits takes the room of a bar that says nothing.
    names = [name for name, _ in columns[3:] if name != "bar" or not is_wide]
    kind_of_state = f"na-c-state {_class_of(status)}"
    return element(
        "tr",
        element("td", str(rank.rank), class_="na-c-rank"),
        element("td", shown, class_=kind_of_state, title=_MEANINGS.get(status)),
        _label(line, kind_of_label, is_wide=is_wide),
        *(element("td", texts[name], class_=f"na-c-{name}") for name in names),
    )


def _percent(rank: RankState, load: int | None) -> str:
    return "" if load is None or rank.has_ended else f"{load}%"


def _memory(num_bytes: int | None) -> str:
    return wording.memory(num_bytes) if num_bytes else ""


def _inner_row(rank: RankState, line: progress.ProgressLine | None) -> Markup:
    """None gives a blank row of the same height; each column has a cell, which CSS may hide."""
    bar: dict[str, str] = {}
    if line is not None:
        bar = {"bar": _bar(rank, line, "na-thin "), "count": line.count, "rate": line.rate}
    label = element("td", class_="na-c-label") if line is None else _label(line)
    cells = (element("td", bar.get(name, ""), class_=f"na-c-{name}") for name, _ in _COLUMNS[3:])
    hidden = "true" if line is None else None
    return element(
        "tr", element("td", colspan=2), label, *cells, class_="na-inner", aria_hidden=hidden
    )


def _label(line: progress.ProgressLine, kind: str = "", *, is_wide: bool = False) -> Markup:
    title = shorten(line.label, 90) if len(line.label) > 18 else None
    label = shorten(line.label, _LABEL_BYTES)
    colspan = 2 if is_wide else None
    return element("td", label, class_=f"na-c-label{kind}", title=title, colspan=colspan)


def _bar(rank: RankState, line: progress.ProgressLine, kind: str) -> Markup:
    return element(
        "progress",
        max=1,
        # A bar without a value would animate anew at every update: an empty one stands still.
        value=round(line.fraction or 0.0, 3),
        aria_label=shorten(f"rank {rank.rank}: {line.text}", 60),
        class_=f"{kind}{_class_of(summary.condition(rank))}",
    )


def _steps(state: RunState) -> Markup:
    table = render_steps(state)
    # Room for a line from the first moment on, so that one which comes moves nothing.
    lines = [element("div", line) for line in step_lines(state)] or [Markup("&nbsp;")]
    slow = element("div", *lines, class_="na-slow")
    return element("div", table, slow, class_="na-steps") if table else table


def _heat_cell(rank: RankState, state: RunState) -> Markup:
    """The colour is the status, the fill the progress."""
    fraction = progress.progress_lines(rank)[0].fraction
    status = summary.live_condition(rank, state)
    far = "" if fraction is None else f" {fraction:.0%}"
    return element(
        "i",
        str(rank.rank),
        class_=_class_of(status),
        style=None if fraction is None else f"--f:{fraction:.0%}",
        title=f"{status}{far}",
    )


def _class_of(status: str) -> str:
    return f"na-{status.replace(' ', '-')}"
