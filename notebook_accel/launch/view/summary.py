"""The summary of a run: the table of its ranks that every view shows at the end.

A table of many ranks is shortened: it has some ranks, failed ranks first, and counts of the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from notebook_accel.launch.control.curves import main_metric
from notebook_accel.launch.control.run_state import RankState, RunState
from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view import progress
from notebook_accel.launch.view.step_times import step_lines, step_table

COLUMNS = ("rank", "state", "progress", "rate", "memory")
SIGNS = {"succeeded": "✓", "failed": "✗", "stopped": "■", "pruned": "■"}
SIGNS |= {"lost peer": "○", "not asked": "○"}
# Metrics that are named in the table; of more the first ones are, and the others counted.
MAX_NAMED_METRICS = 60
# Metrics that are named where all stand in one line.
_MAX_IN_LINE = 4
# Ranks that all have a row of their own; of more, half as many have one, failed ones first.
_MAX_ROWS = 16
# Characters: of the run's name, of a rank's progress, of what is said of a hang.
_MAX_NAME = 60
_MAX_PROGRESS = 100
_MAX_HANG = 2000
# Warnings, and characters of each.
_MAX_WARNINGS = 20
_MAX_WARNING = 300


def elapsed(state: RunState, now: float) -> float:
    """Return how many seconds the run took; if it goes on, until ``now`` (wall time, seconds)."""
    return max(0.0, (state.ended or now) - state.started)


def num_ranks(state: RunState) -> str:
    """Return the number of ranks as text, ``1 rank`` or ``2 ranks``."""
    asked = [rank.rank for rank in state.ranks if rank.is_asked]
    if len(asked) < state.world_size:
        return f"{wording.rank_list(asked)} of {state.world_size}"
    return f"{state.world_size} rank{'s' if state.world_size != 1 else ''}"


def on_what(state: RunState) -> str:
    """Return on what a run trains, and how: ``2 x NVIDIA H200, bf16, FSDP2``; "" if unknown."""
    about = state.training or " and ".join(sorted({rank.device for rank in state.ranks} - {""}))
    # Several ranks may share a device.
    number = len(state.devices) or sum(rank.is_asked for rank in state.ranks)
    return f"{number} x {one_line(about, 100)}" if about else ""


def best_value(state: RunState) -> str:
    """Return the best value of the main metric as text, ``best accuracy 0.91``; "" for none."""
    best = state.ranks[0].best
    main = main_metric(best)
    return "" if main is None else f"best {progress.name_of(main)} {wording.number(best[main])}"


def facts(state: RunState) -> list[str]:
    """Return on what a run trains and how, its main metric's best value, its number of warnings."""
    return [*filter(None, (on_what(state), best_value(state), num_warnings(state)))]


def num_warnings(state: RunState) -> str:
    """Return the number of different warnings as text, ``2 warnings``; "" for none."""
    number = len(state.warnings)
    return f"{number} warning{'s' if number != 1 else ''}" if number else ""


def warning_lines(state: RunState) -> list[str]:
    """Return Python's warnings in ranks, each text once with the ranks that have shown it."""
    lines = [
        f"{one_line(text, _MAX_WARNING)} ({wording.rank_list(ranks)})"
        for text, ranks in state.warnings.items()
    ]
    more = [f"… and {len(lines) - _MAX_WARNINGS} more in run.logs()"][: len(lines) > _MAX_WARNINGS]
    return lines[:_MAX_WARNINGS] + more


def condition(rank: RankState) -> str:
    """Return a rank's status as views show it: ``rank.status``, "lost peer" or "not asked".

    "lost peer" is a rank that failed only because another rank ended. If it were shown as "failed",
    it would draw the eye away from the rank at fault. "not asked" is a rank for which a session's
    call was not meant; if the rank failed or was stopped, its status is shown instead.
    """
    if rank.failure is not None and rank.failure.kind == "lost peer":
        return "lost peer"
    if not rank.is_asked and rank.status in ("starting", "running", "succeeded"):
        return "not asked"
    return rank.status


def live_condition(rank: RankState, state: RunState) -> str:
    """Return what a rank does now: its :func:`condition`, or a more exact word while it runs.

    The words are "paused" (all ranks wait until the run goes on), "suspended" (a signal or debugger
    has stopped its process), "elsewhere" (other ranks wait in a collective that the rank does not
    call), "waits" (the rank waits in a collective) and "quiet" (the rank makes no step and prints
    nothing).
    """
    status = condition(rank)
    if status == "running" and state.status == "paused":
        return "paused"
    if status != "running" or state.status != "running":
        return status
    hang = state.hang
    if rank.is_suspended and rank.quiet_since is not None:
        return "suspended"
    if hang is not None and hang.is_certain and rank.rank in hang.elsewhere:
        return "elsewhere"
    if hang is not None and rank.rank in hang.operations:
        return "waits"
    return "running" if rank.quiet_since is None else "quiet"


def hang_line(state: RunState) -> str:
    """Return a sentence about the current hang, with its duration; "" without a hang.

    In a hang, ranks wait for one another in vain, or a rank's process is suspended. The duration is
    left out if no rank waits in a collective.
    """
    if state.hang is None:
        return ""
    text = one_line(state.hang.text, _MAX_HANG)
    if not state.hang.operations:  # of a rank that is suspended; others may go on
        return text
    seconds = (state.ended or state.now()) - state.hang.since
    return f"Nothing has moved for {wording.clock(seconds)}: {text}"


def slowest_first(state: RunState) -> list[RankState]:
    """Return the ranks in the order of a panel: those with problems first, finished ones last.

    The groups are, by :func:`live_condition`: "failed"; "suspended" and "elsewhere"; "lost peer";
    "quiet"; all other conditions; "succeeded" and "not asked". Within each group the ranks with the
    least progress come first.
    """
    order = {"failed": 0, "suspended": 1, "elsewhere": 1, "lost peer": 2, "quiet": 3}
    order |= {"succeeded": 9, "not asked": 9}

    def key(rank: RankState) -> tuple[int, float, int]:
        line, (items, _) = progress.progress_lines(rank)[0], progress.counted_items(rank)
        far = line.fraction if line.fraction is not None else float(items)
        return order.get(live_condition(rank, state), 5), far, rank.rank

    return sorted(state.ranks, key=key)


def ranks_with_row(ranks: Sequence[RankState]) -> Sequence[RankState]:
    """Return the ranks that get a row of the table, in the order of their numbers.

    If there are at most 16 ranks, all get a row. Of more ranks, eight get a row: failed ranks
    before others, and lower numbers before higher ones.
    """
    if len(ranks) <= _MAX_ROWS:
        return ranks
    culprits_first = sorted(ranks, key=lambda rank: (condition(rank) != "failed", rank.rank))
    return sorted(culprits_first[: _MAX_ROWS // 2], key=lambda rank: rank.rank)


def hidden_ranks(
    ranks: Sequence[RankState],
    shown: Iterable[RankState],
    status_of: Callable[[RankState], str] = condition,
) -> str:
    """Return a line about the ranks without a row; "" if all ranks have a row."""
    with_row = {rank.rank for rank in shown}
    hidden = Counter(status_of(rank) for rank in ranks if rank.rank not in with_row)
    if not hidden:
        return ""
    if len(hidden) == 1:
        return f"… and {hidden.total()} more, all {next(iter(hidden))}"
    parts = [f"{number} {status}" for status, number in hidden.most_common()]
    return f"… and {hidden.total()} more: {', '.join(parts)}"


def rank_facts(rank: RankState, seconds: float) -> tuple[str, str, str, str, str]:
    """Return a rank's row of the summary table: its cells in the order of :data:`COLUMNS`.

    Args:
        seconds: how long the run has taken, pauses aside; the rate of a rank without bars is a mean
            over it.
    """
    items, _ = progress.counted_items(rank)
    throughput = items / seconds if seconds > 0 else None
    status = condition(rank)
    return (
        str(rank.rank),
        f"{SIGNS.get(status, '●')} {status}",
        progress.progress_text(rank, throughput=throughput)[:_MAX_PROGRESS],
        # That of the bar which the progress names last.
        progress.named_lines(rank, throughput=throughput)[-1].rate,
        progress.memory_of(rank),
    )


def summary_lines(state: RunState, *, now: float) -> list[str]:
    """Return the summary as lines: a title, the table of ranks, warnings, metrics."""
    seconds = elapsed(state, now)
    shown = ranks_with_row(state.ranks)
    name = one_line(state.name, _MAX_NAME)
    lines = [f"{name}: {state.status}, {num_ranks(state)}, {wording.span(seconds)}"]
    lines += filter(None, [", ".join(facts(state))])
    rows = [rank_facts(rank, seconds - state.paused_seconds) for rank in shown]
    lines += wording.aligned([COLUMNS, *rows])
    rest = hidden_ranks(state.ranks, shown)
    if rest:
        lines.append(rest)
    lines += [*wording.aligned(step_table(state)), *step_lines(state)]
    lines += [f"⚠ {line}" for line in warning_lines(state)]
    if state.hang is not None:
        lines.append(hang_line(state))
    metrics = list(progress.last_values(state).items())
    lines += [f"{progress.name_of(name)}: {value}" for name, value in metrics[:MAX_NAMED_METRICS]]
    if len(metrics) > MAX_NAMED_METRICS:
        lines.append(f"… and {len(metrics) - MAX_NAMED_METRICS:,} more in run.metrics")
    return lines


def values_line(state: RunState) -> str:
    """Return the last values of metrics in one line: ``loss 0.31, accuracy 0.9``.

    The line is "" without metrics. Of many metrics, only the first are in it, and a count of the
    others.
    """
    metrics = list(progress.last_values(state).items())
    parts = [f"{progress.name_of(name)} {value}" for name, value in metrics[:_MAX_IN_LINE]]
    if len(metrics) > _MAX_IN_LINE:
        parts.append(f"and {len(metrics) - _MAX_IN_LINE:,} more in run.metrics")
    return ", ".join(parts)
