"""The state of a run: small immutable values, and the functions that apply messages to them.

A :class:`RunState` is about one call, with a :class:`RankState` for each rank's part of it; every
view draws it. It holds states, bars, last values and tails only; the whole logs and metrics lie in
the run's folder (``run_folder.py``, ``metrics_file.py``). A :class:`ProcessState` is about the
process of one rank, which may live through many calls.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cache, partial, singledispatch
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_accel.launch import wire
from notebook_accel.launch.control.hang import Hang  # noqa: TC001 (msgspec reads the annotation)
from notebook_accel.launch.text.terminal_text import Tail, append_output

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ENDED",
    "RESCUED",
    "BarState",
    "Display",
    "Failure",
    "ProcessState",
    "Progress",
    "RankState",
    "RunState",
    "apply",
    "apply_to_processes",
    "starting",
]

ENDED = ("succeeded", "failed", "stopped")
# Begins the one notice that is good news.
RESCUED = "what was being trained is kept: "
S = TypeVar("S", "RankState", "RunState", "BarState", "Display")
# Lines kept of each rank's output: as many as a live panel can show.
_MAX_TAIL_LINES = 2000
# Bars kept of each rank: a long training with one bar an epoch, each of which stays (leave=True),
# has more.
_MAX_BARS = 500
# Displays kept of each rank, and their size; views have shown older ones by then.
_MAX_DISPLAYS = 20
_MAX_DISPLAY_BYTES = 8_000_000


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One progress bar of a rank.

    ``n`` and ``total`` in items, ``rate`` in items/s (None if unknown), ``elapsed`` in seconds.
    """

    rank: int
    name: str
    n: float
    total: float | None
    rate: float | None
    elapsed: float


@dataclass(frozen=True, kw_only=True)
class BarState(Progress):
    """A progress bar as the state keeps it, with fields that only views need.

    Attributes:
        bar: counts the rank's bars, in the order in which they were opened.
        unit: what it counts ("it").
        closed: whether it has ended.
        postfix: what it shows after its numbers ("loss=0.31").
        depth: how many bars of its rank were open when it was opened; 0 for an outermost one.
    """

    bar: int
    unit: str
    closed: bool
    postfix: str = ""
    depth: int = 0


@dataclass(frozen=True, kw_only=True)
class Display:
    """One rich output that a rank displayed.

    Attributes:
        number: how many things it had displayed before.
        data: by MIME type; binary data in base64.
        display_id: by which the rank may replace it; "" where it may not.
    """

    number: int
    data: dict[str, str]
    display_id: str = ""


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """The state of one rank's process.

    Attributes:
        agent: number of the agent that started it, among those of the run.
        status: "starting", "ready" (for calls, or in one) or "ended".
        exitcode, signal: how it ended; ``ended_by_agent`` where its agent had ended it.
    """

    rank: int
    agent: int = 0
    pid: int | None = None
    status: str = "starting"
    exitcode: int | None = None
    signal: int | None = None
    ended_by_agent: bool = False


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The state of one rank's part of a call.

    Attributes:
        status: "starting", "running", "succeeded", "failed" or "stopped".
        bars: its progress bars in the order in which they were opened.
        batches: given out by its prepared loaders so far; total_batches: those of an epoch.
        pass_start: ``batches`` less this is the number of the newest batch in its pass through a
            loader; negative after a resume in the middle of a pass.
        steps: made by its prepared optimizers.
        memory, device_memory: bytes; None where unknown.
        cpu, device_use: percent of a core, and of its device; None where unknown.
        device: what it computes on, as a person calls it; "" where unknown.
        is_suspended: whether SIGSTOP or a debugger holds its process.
        quiet_since: since when it made no step and said nothing, by the clock of the run (wall,
            seconds); None while it does.
        metrics: last value of each name, with its step.
        tail: its last lines of output; ``open_line`` says whether the last one goes on,
            ``rewound`` whether what comes next overwrites it.
        num_lines: lines of output that were ended so far, skipped ones included.
        times: when they came, by whole seconds of its machine's wall clock: (number of the first
            line that came then, second).
        skipped_lines: lines that only the file has.
        log_start, log_end: bytes of its file between which its output of this call lies.
        displays: the newest of what it displayed; ``num_displays`` counts all.
        returned, returned_none: whether its function has returned; whether that was None.
        made_group: whether it was in a process group in this call; None where it did not tell.
        lost_group: whether it returned, but had been cut off from the other ranks meanwhile.
        failure: how its function ended, where it raised.
        exitcode, signal: how its process ended, where it did.
        ended_by_agent: whether its agent had ended the process, or had interrupted this call in it
            because another rank failed.
        ended: when its part of the call ended: it returned, raised or died (wall time of its
            machine, seconds).
        agent: number of the agent that started it, among those of the run.
        end_order: how many ranks the kernel knew to have ended before it heard of this one's end.
        after_interrupt: whether its agent had interrupted the ranks before it raised or died.
        is_asked: whether the call is meant for it; the others of a session answer at once.
    """

    rank: int
    is_asked: bool = True
    pid: int | None = None
    status: str = "starting"
    bars: tuple[BarState, ...] = ()
    batches: int = 0
    total_batches: int | None = None
    pass_start: int = 0
    steps: int = 0
    memory: int | None = None
    device_memory: int | None = None
    cpu: int | None = None
    device_use: int | None = None
    device: str = ""
    is_suspended: bool = False
    quiet_since: float | None = None
    metrics: dict[str, tuple[int | None, float]] = field(default_factory=dict)
    tail: tuple[str, ...] = ()
    open_line: bool = False
    rewound: bool = False
    num_lines: int = 0
    times: tuple[tuple[int, int], ...] = ()
    skipped_lines: int = 0
    log_start: int | None = None
    log_end: int = 0
    displays: tuple[Display, ...] = ()
    num_displays: int = 0
    returned: bool = False
    returned_none: bool = False
    made_group: bool | None = None
    lost_group: bool = False
    failure: wire.Raised | None = None
    exitcode: int | None = None
    signal: int | None = None
    ended_by_agent: bool = False
    ended: float | None = None
    agent: int = 0
    end_order: int = 0
    after_interrupt: bool = False

    @property
    def has_ended(self) -> bool:
        return self.ended is not None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The message and attributes of a ``WorkerError`` (errors.py)."""

    message: str
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    traceback: str = ""
    exitcode: int | None = None
    signal: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run, immutable.

    Attributes:
        status: "starting", "running", "stopping", "succeeded", "failed", "stopped".
        started, ended: wall time, seconds; ``ended`` is None while it goes on.
        began: ``time.monotonic()`` of the kernel when it started.
        notices: lines for the person, each once.
        session: id of the session whose ranks were called; empty where they were started for
            this call alone. The files of output are the session's.
        failure: what the run's error says, once it has failed (verdict.py).
        hang: who waits for whom, while ranks seem to wait in vain.
        arguments: what the function was called with, as a short text.
        notebook: name of the notebook's file; "" where nobody says it.
        has_rescued: whether what was being trained was kept, in the kernel that launched the run.
        detached: whether it outlives its kernel; its results are in the run's folder then.
    """

    run: str
    name: str
    ranks: tuple[RankState, ...]
    started: float
    status: str = "starting"
    ended: float | None = None
    notices: tuple[str, ...] = ()
    failure: Failure | None = None
    began: float | None = field(default=None, compare=False)
    session: str = ""
    hang: Hang | None = None
    arguments: str = ""
    notebook: str = ""
    has_rescued: bool = False
    detached: bool = False

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def now(self) -> float:
        """Return wall time in seconds, unaffected by changes of the system clock during the run.

        Durations stay right even if the system's clock is set meanwhile.
        """
        if self.began is None:
            return time.time()
        return self.started + time.monotonic() - self.began

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def ended_well(self) -> bool:
        """Return whether the function returned on all ranks, and none lost its process group."""
        return all(rank.returned and not rank.lost_group for rank in self.ranks)

    @property
    def error(self) -> str:
        """The text of the run's error; "" if it has none."""
        return self.failure.message if self.failure else ""


def starting(*, world_size: int, asked: frozenset[int] | None = None, **fields: Any) -> RunState:
    """Return the state of a run before its call is sent.

    Args:
        world_size: number of ranks.
        asked: those for whom the call is meant; None for all.
        fields: others of :class:`RunState`.
    """
    ranks = tuple(
        RankState(rank=rank, is_asked=asked is None or rank in asked) for rank in range(world_size)
    )
    return RunState(ranks=ranks, began=time.monotonic(), **fields)


def _changed(value: S, **fields: Any) -> S:
    """Return a copy of ``value`` with changed fields; a faster ``dataclasses.replace``.

    It takes a tenth of the time: thousands of messages a second come here, and a state has thirty
    fields.
    """
    new = object.__new__(type(value))
    vars(new).update(vars(value), **fields)
    return new


def _change_rank(
    state: RunState, rank: int | None, change: Callable[[RankState], RankState]
) -> RunState:
    """Return the state with one rank changed; unchanged if the run has no such rank."""
    if rank is None or not 0 <= rank < state.world_size:
        return state
    ranks = (*state.ranks[:rank], change(state.ranks[rank]), *state.ranks[rank + 1 :])
    return _changed(state, ranks=ranks)


def _own_fields(message: wire.Message) -> dict[str, Any]:
    """Return a message's fields without the common head; the state has fields of the same names."""
    return {name: getattr(message, name) for name in _names_of_own_fields(type(message))}


@cache
def _names_of_own_fields(kind: type[wire.Message]) -> tuple[str, ...]:
    head = wire.Message.__struct_fields__
    return tuple(name for name in kind.__struct_fields__ if name not in head)


@singledispatch
def apply(message: wire.Message, state: RunState) -> RunState:  # noqa: ARG001
    """Return the state after a message; unchanged by a message that does not concern it."""
    return state


@apply.register
def _(message: wire.AgentReady, state: RunState) -> RunState:
    pids = message.pids
    ranks = tuple(_changed(rank, pid=pids.get(rank.rank, rank.pid)) for rank in state.ranks)
    return _changed(state, ranks=ranks)


@apply.register
def _(message: wire.CallStarted, state: RunState) -> RunState:
    status = "running" if state.status == "starting" else state.status
    return _change_rank(
        _changed(state, status=status),
        message.rank,
        lambda rank: _changed(rank, status="running", pid=message.process),
    )


@apply.register
def _(message: wire.Metrics, state: RunState) -> RunState:
    by_rank: dict[int | None, list[wire.Metric]] = {}
    for metric in message.metrics:
        by_rank.setdefault(metric.rank, []).append(metric)
    for rank, metrics in by_rank.items():
        state = _change_rank(state, rank, partial(_with_metrics, metrics))
    return state


def _with_metrics(metrics: list[wire.Metric], rank: RankState) -> RankState:
    newest = {**rank.metrics}
    for metric in metrics:
        newest.update((name, (metric.step, value)) for name, value in metric.values.items())
    return _changed(rank, metrics=newest)


@apply.register
def _(message: wire.Displayed, state: RunState) -> RunState:
    def change(rank: RankState) -> RankState:
        new = Display(number=rank.num_displays, data=message.data, display_id=message.display_id)
        same = [one for one in rank.displays if new.display_id and one.display_id == new.display_id]
        # As in a notebook, all of one id show what came last.
        displays = tuple(
            _changed(one, data=new.data) if one in same else one for one in rank.displays
        )
        if message.replaces and same:
            return _changed(rank, displays=_kept(displays))
        # What replaces something of an earlier call is shown anew in this one.
        displays = _kept((*displays, new))
        return _changed(rank, displays=displays, num_displays=rank.num_displays + 1)

    return _change_rank(state, message.rank, change)


def _kept(displays: tuple[Display, ...]) -> tuple[Display, ...]:
    """Drop the oldest displays while there are too many, or they are too large."""
    kept = list(displays)
    while len(kept) > _MAX_DISPLAYS or (len(kept) > 1 and _size(kept) > _MAX_DISPLAY_BYTES):
        del kept[0]
    return tuple(kept)


def _size(displays: list[Display]) -> int:
    return sum(len(text) for one in displays for text in one.data.values())


@apply.register
def _(message: wire.Bar, state: RunState) -> RunState:
    def change(rank: RankState) -> RankState:
        bar = BarState(rank=rank.rank, **_own_fields(message))
        return _changed(rank, bars=_with_bar(rank.bars, bar))

    return _change_rank(state, message.rank, change)


def _with_bar(bars: tuple[BarState, ...], bar: BarState) -> tuple[BarState, ...]:
    """Return the bars with one of them replaced or added; the oldest go if there are too many."""
    for index in range(len(bars) - 1, -1, -1):
        if bars[index].bar == bar.bar:
            bar = _changed(bar, depth=bars[index].depth)
            return (*bars[:index], bar, *bars[index + 1 :])
    bar = _changed(bar, depth=sum(not other.closed for other in bars))
    if len(bars) >= _MAX_BARS:
        # The oldest that was closed: the bar of the epochs is older than all others, and lives.
        oldest = next((index for index, old in enumerate(bars) if old.closed), 0)
        bars = (*bars[:oldest], *bars[oldest + 1 :])
    return (*bars, bar)


@apply.register
def _(message: wire.Notice, state: RunState) -> RunState:
    if message.text in state.notices:
        return state
    return _changed(state, notices=(*state.notices, message.text))


@apply.register
def _(message: wire.Output, state: RunState) -> RunState:
    def change(rank: RankState) -> RankState:
        before = Tail() if message.skipped else Tail(rank.tail, rank.open_line, rank.rewound)
        tail = append_output(before, message.text, limit=_MAX_TAIL_LINES)
        times, mark = rank.times, (rank.num_lines + rank.open_line, int(message.wall))
        if not times or (times[-1][0] < mark[0] and times[-1][1] != mark[1]):
            times = (*times, mark)[-_MAX_TAIL_LINES:]
        return _changed(
            rank,
            times=times,
            tail=tail.lines,
            open_line=tail.is_open,
            rewound=tail.is_rewound,
            num_lines=rank.num_lines + message.skipped + message.text.count("\n"),
            skipped_lines=rank.skipped_lines + message.skipped,
            # Where a program erases its file of output, its output begins anew.
            log_start=message.start
            if rank.log_start is None
            else min(message.start, rank.log_start),
            log_end=message.end,
        )

    return _change_rank(state, message.rank, change)


@apply.register
def _(message: wire.Sample, state: RunState) -> RunState:
    return _change_rank(state, message.rank, lambda rank: _changed(rank, **_own_fields(message)))


@apply.register
def _(message: wire.Returned, state: RunState) -> RunState:
    return _change_rank(
        state,
        message.rank,
        lambda rank: _changed(
            rank,
            status="succeeded",
            returned=True,
            returned_none=message.is_none,
            made_group=message.made_group,
            lost_group=message.lost_group,
            ended=message.wall,
        ),
    )


def _num_ended(state: RunState) -> int:
    return sum(rank.has_ended for rank in state.ranks)


_STATUS_AFTER = {"stopped": "stopped", "interrupted": "stopped"}


@apply.register
def _(message: wire.Raised, state: RunState) -> RunState:
    return _change_rank(
        state,
        message.rank,
        lambda rank: _changed(
            rank,
            status=_STATUS_AFTER.get(message.kind, "failed"),
            # A rank that was interrupted because another one failed has not failed itself.
            failure=None if message.ended_by_agent else message,
            made_group=message.made_group,
            ended_by_agent=message.ended_by_agent,
            ended=message.wall,
            end_order=_num_ended(state),
            after_interrupt=message.after_interrupt,
        ),
    )


@apply.register
def _(message: wire.RankEnded, state: RunState) -> RunState:
    def change(rank: RankState) -> RankState:
        ended = _changed(rank, exitcode=message.exitcode, signal=message.signal)
        if rank.has_ended:
            return ended
        status = "stopped" if message.ended_by_agent else "failed"
        return _changed(
            ended,
            status=status,
            ended_by_agent=message.ended_by_agent,
            ended=message.wall,
            end_order=_num_ended(state),
            after_interrupt=message.after_interrupt,
        )

    return _change_rank(state, message.rank, change)


def apply_to_processes(
    message: wire.Message, processes: tuple[ProcessState, ...]
) -> tuple[ProcessState, ...]:
    """Return the states of the ranks' processes after a message, in the order of the ranks."""
    if isinstance(message, wire.AgentReady):
        pids = message.pids
        return tuple(replace(one, pid=pids.get(one.rank, one.pid)) for one in processes)
    if not isinstance(message, (wire.RankReady, wire.RankEnded)):
        return processes  # thousands a second
    if message.rank is None or not 0 <= message.rank < len(processes):
        return processes
    process = processes[message.rank]
    if isinstance(message, wire.RankReady):
        process = replace(process, status="ready")
    else:
        process = replace(
            process,
            status="ended",
            exitcode=message.exitcode,
            signal=message.signal,
            ended_by_agent=message.ended_by_agent,
        )
    return (*processes[: message.rank], process, *processes[message.rank + 1 :])
