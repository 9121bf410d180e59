"""The summary of a run that a saved notebook keeps: a pure function of the run's state and metrics.

It is read where no code runs: in JupyterLab with an untrusted notebook and no kernel, in nbconvert,
on GitHub. Their sanitisers drop inline SVG, style sheets, CSS variables and ids, and some drop
style attributes as well. So the summary consists of plain tables, ``<details>`` and images,
readable without any style. Its styles are inline, in tones for light and dark pages.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from markupsafe import Markup

from notebook_accel.launch import run_list
from notebook_accel.launch.control.curves import Curve, to_draw
from notebook_accel.launch.control.run_state import RESCUED, RankState, RunState
from notebook_accel.launch.control.stacks import fold_frames
from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line, plain_text
from notebook_accel.launch.view import summary
from notebook_accel.launch.view.progress import name_of
from notebook_accel.launch.view.step_times import step_lines
from notebook_accel.render import panel
from notebook_accel.render.charts import ORIGINAL, draw_metrics
from notebook_accel.render.markup import (
    ansi_to_markup,
    copy_button,
    element,
    join,
    lines_to_markup,
    message_bytes,
    shorten,
)

# It is saved with the notebook, for good: of a hundred runs, 12 MB.
MAX_BYTES = 120_000
# The newest lines for the person, and characters of each.
_MAX_NOTICES = 8
_MAX_NOTICE = 500
# Plots; of further metrics the last values are named.
MAX_PLOTS = 6
# Bytes of the error, whose end is kept, and of the stacks below one fold.
_MAX_ERROR = 12_000
# The last lines of each block of output, as far as all blocks together have room.
_MAX_LINES = 200
# Bytes of a line; and of a block of output: its elements, and the least that is worth a block.
_MAX_LINE = 2_000
_BLOCK_BYTES, _MIN_BLOCK = 800, 400
# Output up to this many lines stays open; of a longer one the last lines do.
_SHORT_OUTPUT = 24
_LAST_LINES = 10
# All the lines that stay open together, of however many ranks.
_MAX_OPEN_LINES = 60
# Characters of output in the summary as text, and of a line of it.
_MAX_OUTPUT_TEXT = 6_000
_MAX_LINE_TEXT = 200

_LINE = "1px solid rgba(128,128,128,.3)"
FONT = "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:13px"
_FRAME = (
    f"border:{_LINE};border-radius:8px;padding:10px 14px;margin:4px 0;max-width:1000px;"
    f"{FONT};line-height:1.5"
)
# Jupyter's own style gives tables equal columns and cells a right alignment. A narrow page scrolls
# the table: how each rank stands, and how far it is, are in sight from the start.
_SCROLLS = "overflow:auto;margin:6px 0 4px"
_TABLE = "table-layout:auto;width:auto;border:none;border-collapse:collapse;margin:0;font-size:13px"
_ROW = "background:none"
_CELL = (
    "text-align:left;vertical-align:top;padding:2px 14px 2px 0;border:none;font-size:13px;"
    "white-space:nowrap"
)
# That of a rank may be long: it wraps, and has at least so much room.
_PROGRESS = "white-space:normal;min-width:100px"
_HEAD = f"{_CELL};font-weight:normal;font-size:11px;opacity:.65"
_SMALL_CELL = f"{_CELL};font-size:12px;opacity:.8"
_MONO = "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px"
_TEXT = (
    f"{_MONO};white-space:pre-wrap;word-break:break-word;overflow:auto;max-height:400px;"
    "margin:2px 0 6px;padding:6px 10px;background:rgba(128,128,128,.1);border-radius:4px;"
    "line-height:1.4;text-align:left"
)
_PLAIN_TEXT = f"{_TEXT};background:none;padding:0"
MUTED = "opacity:.65"
_BUTTON = (
    f"margin-left:8px;padding:0 8px;{FONT};font-size:12px;line-height:20px;border:{_LINE};"
    "border-radius:6px;background:none;color:inherit;cursor:pointer"
)
COLOURS = {"succeeded": "#3a9a55", "failed": "#cf4f57", "stopped": "#b7791f", "pruned": "#b7791f"}
# What the run is called that another one is a clone of, or goes on with, and its curves.
_Before: TypeAlias = tuple[str, Mapping[str, Curve]]
# Pages typeset "$5 or $6" as mathematics, unless a class tells them not to.
NO_MATHS = "mathjax_ignore tex2jax_ignore"


def _bundle(html: Markup, text: str, displays: str = "") -> dict[str, str]:
    """Return a summary as a MIME bundle; ``displays`` is a rank's own HTML, shown below."""
    # Without a line break: one that is followed by another would end the HTML where a notebook is
    # converted to Markdown. In what the person made, a script may need it.
    return {"text/html": str(html).replace("\n", "&#10;") + displays, "text/plain": text}


def render_line(text: str) -> dict[str, str]:
    """Return one text in the summary's frame, for a run that has not begun."""
    # A command for another machine stands in a line of its own, and wraps rather than be cut.
    style = f"{MUTED};white-space:pre-wrap;overflow-wrap:anywhere"
    line = element("span", text, style=style)
    return _bundle(element("div", line, class_=NO_MATHS, style=_FRAME), text)


def render_slim(
    state: RunState, *, now: float | None = None, with_output: bool = True
) -> dict[str, str]:
    """Return one line and the output below it, for cells too short for a table of ranks.

    ``now`` is wall time, None for a run that has ended; no output where it is printed already.
    """
    now = state.started if now is None else now
    values = summary.values_line(state)
    line = element(
        "div",
        *_title_parts(state, summary.elapsed(state, now)),
        element("span", f" · {values}", style=MUTED) if values else "",
        style=FONT,
    )
    title = summary.summary_lines(state, now=now)[0]
    text = [f"{title}, {values}" if values else title]
    text += _output_text(state) if with_output else []
    parts = [line, _notices(state, with_output), other_displays(state)]
    if with_output:
        parts.insert(-1, _output(state, _PLAIN_TEXT, MAX_BYTES - message_bytes(join(parts))))
    # As far from the edge as JupyterLab puts what a cell prints: its values stand right below.
    html = element("div", *parts, class_=NO_MATHS, style="padding:0 7px")
    return _bundle(html, "\n".join(text))


def render_snapshot(
    state: RunState,
    curves: Mapping[str, Curve] | None = None,
    *,
    now: float | None = None,
    with_output: bool = True,
    with_displays: bool = False,
    asked_stacks: panel.AskedStacks | None = None,
    original: _Before = ("", {}),
) -> dict[str, str]:
    """Return the summary of a run: ranks, notices, errors, metrics, output.

    Args:
        curves: by the metrics' names.
        now: wall time in seconds, for a run that still goes on; None for one that has ended.
        with_output: False where output and notices are printed already.
        with_displays: False where each display is an output of its own.
        asked_stacks: a title and stacks, if a click on Stacks fetched them.
        original: what the run is called that this one is a clone of, or goes on with, and its
            curves, which are pale.
    """
    now = state.started if now is None else now
    seconds = summary.elapsed(state, now)
    stacks = [] if asked_stacks is None else [asked_stacks]
    if state.hang is not None and state.hang.stacks:
        stacks.insert(0, ("stacks of the ranks", state.hang.stacks))
    parts = [
        element("div", *_title_parts(state, seconds, *summary.facts(state))),
        _table(state, seconds),
        _steps(state),
        _notices(state, with_output),
        panel.render_warnings(state),
        *(
            panel.fold_of_stacks(title, found, max_bytes=_MAX_ERROR, style=_TEXT)
            for title, found in stacks
        ),
        _failure(state),
        _metrics(curves or {}, original),
        other_displays(state),
    ]
    if with_output:
        parts.insert(-1, _output(state, _TEXT, MAX_BYTES - message_bytes(join(parts))))
    html = element("div", *parts, class_=NO_MATHS, style=_FRAME)
    # Not as Markup, which would escape what it is added to.
    displays = str(render_displays(state)) if with_displays else ""
    # For terminals and files: no HTML, and nothing that a terminal would obey.
    lines = summary.summary_lines(state, now=now)
    if with_output:
        lines += [one_line(text, _MAX_NOTICE) for text in state.notices[-_MAX_NOTICES:]]
        lines += _output_text(state)
    if state.error:
        lines.append(_end(plain_text(state.error), 4000))
    return _bundle(html, "\n".join(lines), displays)


# ---- title, ranks, notices and failure -----------------------------------------------------


def _title_parts(state: RunState, seconds: float, *facts: str) -> list[Markup | str]:
    colour = f"color:{COLOURS.get(state.status, '#2f86d6')}"
    took = f"{summary.num_ranks(state)}, {wording.span(seconds)}"
    # Each in one piece, wherever a narrow page breaks the line.
    style = f"{MUTED};display:inline-block"
    *others, last = took, *facts
    texts = [*(f"{one} ·" for one in others), last]
    pieces = [element("span", text, style=style) for text in texts]
    return [
        element("b", shorten(state.name, 60), style="font-size:14px"),
        " ",
        element("b", f"{summary.SIGNS.get(state.status, '●')} {state.status}", style=colour),
        *(part for piece in pieces for part in (" ", piece)),
    ]


def _table(state: RunState, seconds: float) -> Markup:
    shown = summary.ranks_with_row(state.ranks)
    seconds -= state.paused_seconds
    facts = [
        dict(zip(summary.COLUMNS, summary.rank_facts(rank, seconds), strict=True)) for rank in shown
    ]
    # A column that says nothing of any rank is left out.
    names = [name for name in summary.COLUMNS if any(row[name] for row in facts)]
    head = [element("th", name, style=_HEAD) for name in names]
    rows: list[Markup] = []
    for rank, row in zip(shown, facts, strict=True):
        colour = COLOURS.get(summary.condition(rank))
        styles = {
            "state": f"{_CELL};color:{colour}" if colour else _CELL,
            "progress": f"{_CELL};{_PROGRESS}",
        }
        cells = [element("td", row[name], style=styles.get(name, _CELL)) for name in names]
        rows.append(element("tr", *cells, style=_ROW))
    table = element(
        "table",
        element("thead", element("tr", *head, style=_ROW)),
        element("tbody", *rows),
        style=_TABLE,
    )
    rest = summary.hidden_ranks(state.ranks, shown)
    return join(
        [element("div", table, style=_SCROLLS), element("div", rest, style=MUTED) if rest else ""]
    )


def _steps(state: RunState) -> Markup:
    table = panel.render_steps(state, table=_TABLE, tr=_ROW, th=_HEAD, td=_SMALL_CELL)
    lines = [element("div", f"⚠ {line}") for line in step_lines(state)]
    return join([element("div", table, style=_SCROLLS), *lines]) if table else table


def _notices(state: RunState, with_output: bool) -> Markup:
    hang = (summary.hang_line(state),) if state.hang is not None else ()
    # Printed as the ranks' output is, where that is not here.
    notices = state.notices[-_MAX_NOTICES:] if with_output else ()
    lines = []
    for text in (*hang, *notices):
        is_kept = text.startswith(RESCUED)
        # By its id the run is found in any cell, also after another launch or a restart.
        code = f"{run_list.expression(state.run)}.rescued"
        copy = copy_button(code, style=_BUTTON) if is_kept else ""
        sign = "✓" if text.startswith((RESCUED, "saved in ")) else "⚠"
        lines.append(element("div", f"{sign} {shorten(text, _MAX_NOTICE)}", copy))
    return join(lines)


def _failure(state: RunState) -> Markup:
    if not state.error:
        return Markup("")
    first, _, rest = state.error.partition("\n")
    colour = f"color:{COLOURS['failed']};margin:6px 0"
    head = element("div", element("b", shorten(first, 500)), style=colour)
    text = element("pre", _end(rest.strip("\n"), _MAX_ERROR), style=_TEXT)
    fold = element("details", element("summary", "traceback"), text)
    return join([head, fold] if rest.strip() else [head])


def _end(text: str, max_bytes: int) -> str:
    return shorten(text[: -max_bytes - 2 : -1], max_bytes)[::-1]


# ---- metrics -------------------------------------------------------------------------------


def _metrics(curves: Mapping[str, Curve], original: _Before) -> Markup:
    if not curves:
        return Markup("")
    # A knob that was set before the first value comes last all the same.
    first = to_draw(curves)
    names = [*first, *(name for name in curves if name not in first)]
    label, before = original
    drawn = {
        name: {"": curves[name], **({ORIGINAL: before[name]} if name in before else {})}
        for name in names[:MAX_PLOTS]
    }
    is_there = any(len(each) > 1 for each in drawn.values())
    parts = [element("div", f"pale: {label}", style=MUTED)] if is_there else []
    parts.append(draw_metrics(drawn))
    others = names[MAX_PLOTS:]
    if others:
        values = [
            f"{name_of(name)} {wording.number(curves[name].last)}"
            for name in others[: summary.MAX_NAMED_METRICS]
        ]
        hidden = len(others) - summary.MAX_NAMED_METRICS
        if hidden > 0:
            values.append(f"… and {hidden:,} more in run.metrics")
        parts.append(element("div", ", ".join(values), style="margin:6px 0 2px"))
    return join(parts)


# ---- output --------------------------------------------------------------------------------


def _output(state: RunState, style: str, room: int) -> Markup:
    """Return the output, one block for all ranks that printed the same, in ``room`` bytes at most.

    The first and short ones are open. With too little room, one line says where the output is.
    """
    alike = _printed_alike(state, _MAX_LINES)
    share = room // (len(alike) + 1) - _BLOCK_BYTES
    if alike and share < _MIN_BLOCK:
        num = sum(total * len(ranks) for (_, total), ranks in alike)
        return element("div", f"{num:,} lines of output: all of it in run.logs()", style=MUTED)
    blocks: list[Markup] = []
    folds: list[Markup] = []
    folded: list[int] = []
    num_open = _MAX_OPEN_LINES
    for (printed, total), ranks in alike:
        label = wording.rank_list(ranks) if state.world_size > 1 else ""
        lines = _newest(printed, share)
        # The output of the rank at fault, else of the first one, is what most people look for,
        # however long.
        if not blocks or total <= min(num_open, _SHORT_OUTPUT):
            num_open -= total
            num = _LAST_LINES if total > _SHORT_OUTPUT else _SHORT_OUTPUT
            blocks.append(_block(lines[-num:], total, label, style, lines[:-num]))
        else:
            folds.append(_block(lines, total, label, style))
            folded += ranks
    if folds:
        title = element("summary", f"output of {wording.rank_list(folded)}", style=FONT)
        blocks.append(element("details", title, *folds))
    return join(blocks)


def _printed_alike(
    state: RunState, max_lines: int
) -> list[tuple[tuple[tuple[str, ...], int], list[int]]]:
    """Group ranks by ((last lines, number of all lines), ranks), one at fault first.

    A traceback at an output's end that the error shows already is left out.
    """
    alike: dict[tuple[tuple[str, ...], int], list[int]] = {}
    for rank in state.ranks:
        lines = rank.tail
        total = max(rank.num_lines + rank.open_line, len(lines))
        if rank.failure is not None:
            # A rank prints the traceback that the error shows: once is enough. Of one that lost
            # another rank its last line says all, and the error mostly nothing.
            text = rank.failure.traceback.rstrip("\n")
            traceback = tuple(text.split("\n"))
            keeps = summary.condition(rank) == "lost peer"
            is_shown = keeps or not state.error or plain_text(fold_frames(text)) in state.error
            end = lines[-len(traceback) :]
            # It may have begun in a line that was still open.
            is_at_end = end[1:] == traceback[1:] and end[:1] and end[0].endswith(traceback[0])
            if is_shown and is_at_end:
                opened = end[0].removesuffix(traceback[0])
                kept = (*[opened] * bool(opened), *traceback[-1:] * keeps)
                lines = (*lines[: -len(traceback)], *kept)
                total -= len(traceback) - len(kept)
        if total:
            alike.setdefault((lines[-max_lines:], total), []).append(rank.rank)
    culprits = {rank.rank for rank in state.ranks if summary.condition(rank) == "failed"}
    return sorted(alike.items(), key=lambda item: culprits.isdisjoint(item[1]))


def _newest(lines: Sequence[str], room: int) -> list[str]:
    """Return the last lines that fit into ``room`` bytes; long lines are cut."""
    kept: list[str] = []
    for line in reversed(lines):
        cut = shorten(line, _MAX_LINE)
        room -= message_bytes(ansi_to_markup(cut)) + 2
        if room < 0:
            break
        kept.insert(0, cut)
    return kept


def _block(
    lines: Sequence[str], total: int, label: str, style: str, earlier: Sequence[str] = ()
) -> Markup:
    """``label`` is "" for one rank; ``earlier`` lines stand in a fold."""
    title = label
    if len(lines) < total:
        who = f"{label}: " if label else ""
        title = f"{who}last {len(lines)} of {total:,} lines of output"
    head = element("div", title, style=f"{FONT};{MUTED}") if title else Markup("")
    if earlier:
        # True of the fold while it is closed, and of the open one.
        title += f", {len(earlier)} earlier ones in this fold"
        head = element(
            "details", element("summary", title, style=FONT), lines_to_markup(earlier, style)
        )
    return join([head, lines_to_markup(lines, style)])


def _output_text(state: RunState) -> list[str]:
    lines: list[str] = []
    room = _MAX_OUTPUT_TEXT
    for (printed, total), ranks in _printed_alike(state, _SHORT_OUTPUT):
        num = _LAST_LINES if total > _SHORT_OUTPUT else _SHORT_OUTPUT
        found = [plain_text(line)[:_MAX_LINE_TEXT] for line in printed[-num:]]
        room -= sum(map(len, found))
        if room < 0:
            lines.append("more output: run.logs()")
            break
        title = f"output of {wording.rank_list(ranks)}" if state.world_size > 1 else "output"
        hidden = total - len(found)
        lines += [f"{title}, the last lines of {total:,}:" if hidden else f"{title}:"]
        lines += found
    return lines


# ---- what ranks display -------------------------------------------------------------------

# Of one piece of HTML: at a run's end it is sent twice at once, and a Jupyter server drops what is
# more than 3 MB in 3 seconds.
_MAX_BYTES = 700_000
LABEL_STYLE = "opacity:.65;font-size:13px;padding:0 7px"


def render_displays(state: RunState) -> Markup:
    """For a run whose cell has ended, to whose outputs nothing can be added; "" for no displays."""
    rank = first_asked(state)
    shown: list[Markup] = []
    room = _MAX_BYTES
    for display in reversed(rank.displays):
        html = element("div", _as_html(display.data), style="margin:4px 0;overflow-x:auto")
        room -= message_bytes(html)
        if room < 0:
            break
        shown.insert(0, html)
    lines = [f"rank {rank.rank}"] if state.world_size > 1 and rank.displays else []
    if num_hidden := rank.num_displays - rank.num_cleared - len(shown):
        show = f"{run_list.expression(state.run)}.show({rank.rank})"
        has_more = len(shown) < len(rank.displays)
        newest = f": {show} shows the newest {len(rank.displays)}" if has_more else ""
        lines.append(f"{num_hidden:,} more not shown here{newest}")
    return join([*(element("div", line, style=LABEL_STYLE) for line in lines), *shown])


def other_displays(state: RunState) -> Markup:
    """Return a line that names the ranks that displayed other things than shown; "" for none."""
    contents = {rank.rank: [one.data for one in rank.displays] for rank in state.ranks}
    shown = contents[first_asked(state).rank]
    others = [rank for rank, each in contents.items() if each not in ([], shown)]
    if not others:
        return Markup("")
    show = f"{run_list.expression(state.run)}.show({others[0]})"
    return element("div", f"what {wording.rank_list(others)} displayed: {show}", style=MUTED)


def first_asked(state: RunState) -> RankState:
    """Return the rank whose displays are shown; a call may be for some ranks only (``--ranks``)."""
    return next((rank for rank in state.ranks if rank.is_asked), state.ranks[0])


def _as_html(data: Mapping[str, str]) -> Markup:
    """Return its own HTML, or else its image (base64 but for SVG), or else its text."""
    if "text/html" in data:
        # The person's own, as an output of an ordinary cell would hold it.
        return Markup(data["text/html"])
    for mime, content in data.items():
        if mime.startswith("image/"):
            # SVG comes as text, other images in base64.
            encoded = content
            if mime == "image/svg+xml":
                encoded = base64.b64encode(content.encode(errors="replace")).decode()
            alt = data.get("text/plain", "")[:200]
            source = f"data:{mime};base64,{encoded}"
            return element("img", alt=alt, src=source, style="max-width:100%")
    written = (data[mime] for mime in ("text/markdown", "text/latex", "text/plain") if mime in data)
    return element("pre", next(written, ""))
