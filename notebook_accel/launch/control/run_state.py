"""The state of a run: small immutable values, and the functions that apply messages to them.

A :class:`RunState` describes one call, with a :class:`RankState` for each rank's part of it; the
views draw it. It holds only what views show: statuses, progress bars, the newest metrics and the
last lines of output. Complete logs and metrics are in the run's folder (``run_folder.py``,
``metrics_file.py``). A :class:`ProcessState` describes the process of one rank, which in a session
runs many calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, singledispatch
from typing import Any, TypeVar

from notebook_accel import wire
from notebook_accel.launch.control.curves import mode_of
from notebook_accel.launch.text.terminal_text import Tail, append_output

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
    """One progress bar (tqdm) of a rank.

    Attributes:
        rank: number of the rank.
        name: the bar's description; "" if it has none.
        n: items done so far.
        total: items in all; None if unknown.
        rate: items per second; None if unknown.
        elapsed: seconds since the bar was opened.
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
        opened_at, changed_at: how far the rank's training had come (``RankState.trained``) when the
            bar opened, and when it changed last.
    """

    bar: int
    unit: str
    closed: bool
    postfix: str = ""
    depth: int = 0
    opened_at: int = 0
    changed_at: int = 0


@dataclass(frozen=True, kw_only=True)
class Display:
    """One rich output that a rank displayed, such as a figure or a table."""

    number: int
    data: dict[str, str]
    display_id: str = ""


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """The state of one rank's process.

    Attributes:
        pid: process id; None before it is known.
        status: "starting", "ready" (waits for a call, or runs one) or "ended".
        exitcode: the process's exit code; None if a signal killed it, or it has not ended.
        signal: number of the signal that killed the process; None if none did.
    """

    rank: int
    agent: int = 0
    pid: int | None = None
    status: str = "starting"
    exitcode: int | None = None
    signal: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankState(wire.Usage):
    """The state of one rank's part of a call, with the counters and resource use of the rank.

    Attributes:
        is_asked: False if the user left this rank of a session out of the call (a cell that runs on
            some ranks only): the rank gets the call, but does not run the cell.
        pid: id of the rank's process; None before it is known.
        status: "starting", "running", "succeeded", "failed" or "stopped".
        quiet_since: the time (``RunState.now``) since which the rank has made no progress and
            printed nothing; None if it did either in the last 5 seconds.
        metrics: the newest value of each metric, by name, as (step, value); the step may be None.
        best: the best value so far of each metric whose name says whether that is the lowest.
        times: when lines came, as pairs (number of a line, from 0 on; second of the machine's wall
            clock). A pair holds for its line and the following ones, up to the next pair's line.
        log_start, log_end: byte offsets in the rank's log file between which the output of this
            call lies; ``log_start`` is None before the first output.
        returned_none: whether the function returned None.
        made_group: whether the rank was in a process group in this call; None before its function
            has ended, or if the process died.
        lost_group: whether the function returned after the rank had been disconnected from its
            process group, so that the group cannot be used again.
        failure: the exception that the function raised; None if it raised none, or was interrupted
            because another rank failed.
        exitcode, signal: how the rank's process ended, once it has: one of the two is not None.
        crash: the user's frames where native code crashed, newest first; "" for other ends.
        ended: when the rank's part of the call ended: its function returned or raised, or its
            process died (wall time of its machine, in seconds). None before.
        end_order: how many other ranks had ended when the kernel was told that this one has failed
            or died. It orders failures on machines whose clocks differ.
        after_interrupt: whether the agent had already interrupted the ranks when this one raised
            or died: such an error may be a consequence of the interrupt.
    """

    rank: int
    is_asked: bool = True
    pid: int | None = None
    status: str = "starting"
    bars: tuple[BarState, ...] = ()
    quiet_since: float | None = None
    metrics: dict[str, tuple[int | None, float]] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    tail: tuple[str, ...] = ()
    open_line: bool = False
    rewound: bool = False
    num_lines: int = 0
    times: tuple[tuple[int, int], ...] = ()
    log_start: int | None = None
    log_end: int = 0
    displays: tuple[Display, ...] = ()
    num_displays: int = 0
    num_cleared: int = 0
    returned: bool = False
    returned_none: bool = False
    made_group: bool | None = None
    lost_group: bool = False
    failure: wire.Raised | None = None
    exitcode: int | None = None
    signal: int | None = None
    crash: str = ""
    ended_by_agent: bool = False
    ended: float | None = None
    agent: int = 0
    end_order: int = 0
    after_interrupt: bool = False

    @property
    def has_ended(self) -> bool:
        return self.ended is not None

    @property
    def trained(self) -> int:
        """Number of batches and steps so far: 0 before the rank trains, and it grows then."""
        return self.batches + self.steps


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run failed: the message and the attributes of its ``WorkerError`` (errors.py).

    Attributes:
        rank: the rank whose failure is the cause; None if the cause is no rank's, such as a lost
            agent.
        traceback: formatted traceback of the cause; "" if there is none.
        exitcode: exit code of that rank's process; None if a signal killed it or ``rank`` is None.
        signal: name of the signal that killed that rank's process ("SIGKILL"); None if none did.
    """

    message: str
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    traceback: str = ""
    exitcode: int | None = None
    signal: str | None = None
    is_of_start: bool = False


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Ranks that wait in collectives for ranks that do not come, or that are suspended (SIGSTOP).

    Attributes:
        since: the last time at which any rank made progress (``RunState.now``: wall time, seconds).
    """

    is_certain: bool
    text: str
    since: float
    operations: dict[int, str]
    elsewhere: dict[int, str]
    stacks: tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True, kw_only=True)
class TrialOf:
    """Which trial of which sweep a run is; ``metric`` and ``mode`` say which trial is the best."""

    sweep: str
    name: str
    number: int
    metric: str | None
    mode: str


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run (one call on all ranks). Immutable: each change makes a new one.

    Attributes:
        status: "starting", "running", "paused", "stopping", "succeeded", "failed" or "stopped".
        started, ended: wall time in seconds; ``ended`` is None while the run goes on.
        began: ``time.monotonic()`` of this process when the run started; None if this state was
            read from the folder of a run, since other processes have another clock.
        session: id of the session whose ranks were called, and which owns the log files; "" if the
            ranks were started for this call alone.
        failure: why the run failed (verdict.py); None if it has not failed.
        timeout: seconds after which the launch ends the run; None for no limit.
        timed_out: whether the run was stopped because of that limit.
        rescued_as: if the run was stopped and its training state was kept, the code by which the
            user gets that state; else "". In the run's folder it is "", too: it is for this kernel.
        hang: which ranks wait for which others if the run hangs, or hung when its end was asked
            for; else None.
        notebook: file name of the notebook; "" if unknown.
        devices: indices of the accelerators of this machine that the ranks use, if that is known.
        training: device, precision and strategy, such as "CPU, bf16, DDP"; "" if unknown.
        warnings: texts of Python's warnings, with the ranks that have shown them.
        checkpoint: folder of the newest checkpoint that the run wrote; "" before the first.
        origin: id of the run of which this one is a clone, or goes on with; "" if there is none.
        trial: which trial of a sweep it is; None if it is none.
        paused_seconds: how long its pauses have taken, one that goes on aside.
    """

    run: str
    name: str
    ranks: tuple[RankState, ...]
    started: float
    status: str = "starting"
    ended: float | None = None
    notices: tuple[str, ...] = ()
    failure: Failure | None = None
    timeout: float | None = None
    timed_out: bool = False
    rescued_as: str = ""
    began: float | None = field(default=None, compare=False)
    session: str = ""
    hang: Hang | None = None
    arguments: str = ""
    notebook: str = ""
    has_rescued: bool = False
    detached: bool = False
    knobs: dict[str, wire.KnobMade] = field(default_factory=dict)
    checkpoint: str = ""
    origin: str = ""
    trial: TrialOf | None = None
    devices: tuple[int, ...] = ()
    training: str = ""
    warnings: dict[str, tuple[int, ...]] = field(default_factory=dict)
    paused_seconds: float = 0.0

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def now(self) -> float:
        """Return the time in seconds, on the same clock as ``started``.

        It is ``started`` plus the seconds since then by the monotonic clock, so that durations stay
        right even if the system clock is set. If ``began`` is None, it is the system clock's time.
        """
        if self.began is None:
            return time.time()
        return self.started + time.monotonic() - self.began

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def ended_well(self) -> bool:
        """Whether the function returned on all ranks, and none was cut off from its process group.

        If False, the ranks of a session make a new process group for the next call.
        """
        return all(rank.returned and not rank.lost_group for rank in self.ranks)

    @property
    def error(self) -> str:
        """The message of the run's error; "" if the run has not failed."""
        return self.failure.message if self.failure else ""


def starting(*, world_size: int, asked: frozenset[int] | None = None, **fields: Any) -> RunState:
    """Return the state of a run at its start, before its call is sent.

    Args:
        asked: numbers of the ranks that the call is meant for (``RankState.is_asked``); None for
            all.
    """
    ranks = tuple(
        RankState(rank=rank, is_asked=asked is None or rank in asked) for rank in range(world_size)
    )
    return RunState(ranks=ranks, began=time.monotonic(), **fields)


def _changed(value: S, **fields: Any) -> S:
    """Return a copy of ``value`` with changed fields, as ``dataclasses.replace`` does.

    It takes a tenth of the time of ``replace``, which matters: thousands of messages per second
    change a state, and a state has thirty fields.
    """
    new = object.__new__(type(value))
    vars(new).update(vars(value), **fields)
    return new


def _change_rank(
    state: RunState, rank: int | None, change: Callable[[RankState], RankState]
) -> RunState:
    """Return the state with the state ``s`` of one rank replaced by ``change(s)``."""
    if rank is None or not 0 <= rank < state.world_size:
        return state
    ranks = (*state.ranks[:rank], change(state.ranks[rank]), *state.ranks[rank + 1 :])
    return _changed(state, ranks=ranks)


@singledispatch
def apply(message: wire.Message, state: RunState) -> RunState:  # noqa: ARG001
    """Return the state after a message of a rank or agent.

    The classes of messages that change the state have implementations below. All others leave it
    unchanged.
    """
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
def _(message: wire.KnobMade, state: RunState) -> RunState:
    return _changed(state, knobs={**state.knobs, message.name: message})


@apply.register
def _(message: wire.Saved, state: RunState) -> RunState:
    return _changed(state, checkpoint=message.folder)


@apply.register
def _(message: wire.Metrics, state: RunState) -> RunState:
    by_rank: dict[int | None, list[wire.Metric]] = {}
    for metric in message.metrics:
        by_rank.setdefault(metric.rank, []).append(metric)
    for rank, metrics in by_rank.items():
        state = _change_rank(state, rank, partial(_with_metrics, metrics))
    return state


def _with_metrics(metrics: list[wire.Metric], rank: RankState) -> RankState:
    newest, best = {**rank.metrics}, {**rank.best}
    for metric in metrics:
        newest.update((name, (metric.step, value)) for name, value in metric.values.items())
        for name, value in metric.values.items():
            if (mode := mode_of(name)) and math.isfinite(value):
                so_far = best.get(name, value)
                best[name] = min(value, so_far) if mode == "min" else max(value, so_far)
    return _changed(rank, metrics=newest, best=best)


@apply.register
def _(message: wire.Displayed, state: RunState) -> RunState:
    def change(rank: RankState) -> RankState:
        if message.clears:
            rank = _changed(rank, displays=(), num_cleared=rank.num_displays)
            if not message.data and not message.display_id:
                return rank
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
    """Return the newest displays, at most 20 and 8 MB; the newest one is kept at any size."""
    kept = list(displays)
    sizes = [sum(map(len, one.data.values())) for one in displays]
    while len(kept) > _MAX_DISPLAYS or (len(kept) > 1 and sum(sizes) > _MAX_DISPLAY_BYTES):
        del kept[0], sizes[0]
    return tuple(kept)


@apply.register
def _(message: wire.Bar, state: RunState) -> RunState:
    def change(rank: RankState) -> RankState:
        own = message.__struct_fields__[len(wire.Message.__struct_fields__) :]
        fields = {name: getattr(message, name) for name in own}
        at = rank.trained
        bar = BarState(rank=rank.rank, opened_at=at, changed_at=at, **fields)
        return _changed(rank, bars=_with_bar(rank.bars, bar))

    return _change_rank(state, message.rank, change)


def _with_bar(bars: tuple[BarState, ...], bar: BarState) -> tuple[BarState, ...]:
    """Return the bars with ``bar`` in place of that with its number, or at the end; 500 at most."""
    for index in range(len(bars) - 1, -1, -1):
        if bars[index].bar == bar.bar:
            # A bar that advances after those around it were closed is inside of them no more.
            around = sum(not outer.closed for outer in bars[:index])
            depth = bars[index].depth
            depth = depth if bar.closed else min(depth, around)
            bar = _changed(bar, depth=depth, opened_at=bars[index].opened_at)
            return (*bars[:index], bar, *bars[index + 1 :])
    bar = _changed(bar, depth=sum(not other.closed for other in bars))
    if len(bars) >= _MAX_BARS:
        # The oldest that was closed: the bar of the epochs is older than all others, and lives.
        oldest = next((index for index, old in enumerate(bars) if old.closed), 0)
        bars = (*bars[:oldest], *bars[oldest + 1 :])
    return (*bars, bar)


@apply.register
def _(message: wire.Notice, state: RunState) -> RunState:
    if message.kind == "training":
        return _changed(state, training=message.text)
    if message.kind == "warning":
        ranks = (*state.warnings.get(message.text, ()), message.rank or 0)
        return _changed(state, warnings={**state.warnings, message.text: ranks})
    if message.text in state.notices:
        return state
    return _changed(state, notices=(*state.notices, message.text))


@apply.register
def _(message: wire.Output, state: RunState) -> RunState:
    def change(rank: RankState) -> RankState:
        before = Tail() if message.skipped else Tail(rank.tail, rank.open_line, rank.rewound)
        tail = append_output(before, message.text, limit=_MAX_TAIL_LINES)
        times, mark = rank.times, (rank.num_lines + rank.open_line, int(message.wall))
        # Text within an open line begins no line: the next one may come seconds later.
        begins = message.skipped or not rank.open_line or "\n" in message.text[:-1]
        if begins and message.text and (not times or times[-1][1] != mark[1]):
            times = (*times, mark)[-_MAX_TAIL_LINES:]
        return _changed(
            rank,
            times=times,
            tail=tail.lines,
            open_line=tail.is_open,
            rewound=tail.is_rewound,
            num_lines=rank.num_lines + message.skipped + message.text.count("\n"),
            # Where a program erases its file of output, its output begins anew.
            log_start=message.start
            if rank.log_start is None
            else min(message.start, rank.log_start),
            log_end=message.end,
        )

    return _change_rank(state, message.rank, change)


@apply.register
def _(message: wire.Sample, state: RunState) -> RunState:
    return _change_rank(state, message.rank, lambda rank: _changed(rank, **vars(message.usage)))


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


@apply.register
def _(message: wire.Raised, state: RunState) -> RunState:
    return _change_rank(
        state,
        message.rank,
        lambda rank: _changed(
            rank,
            status="stopped" if message.kind in ("stopped", "interrupted") else "failed",
            # A rank that was interrupted because another one failed has not failed itself.
            failure=None if message.ended_by_agent else message,
            made_group=message.made_group,
            ended_by_agent=message.ended_by_agent,
            ended=message.wall,
            end_order=sum(one.has_ended for one in state.ranks),
            after_interrupt=message.after_interrupt,
        ),
    )


@apply.register
def _(message: wire.RankEnded, state: RunState) -> RunState:
    def change(rank: RankState) -> RankState:
        how = {"exitcode": message.exitcode, "signal": message.signal, "crash": message.stack}
        ended = _changed(rank, **how)
        if rank.has_ended:
            return ended
        status = "stopped" if message.ended_by_agent else "failed"
        return _changed(
            ended,
            status=status,
            ended_by_agent=message.ended_by_agent,
            ended=message.wall,
            end_order=sum(one.has_ended for one in state.ranks),
            after_interrupt=message.after_interrupt,
        )

    return _change_rank(state, message.rank, change)


def apply_to_processes(
    message: wire.Message, processes: tuple[ProcessState, ...]
) -> tuple[ProcessState, ...]:
    """Return the states of the rank processes after a message of a rank or agent."""
    if isinstance(message, wire.AgentReady):
        pids = message.pids
        return tuple(replace(one, pid=pids.get(one.rank, one.pid)) for one in processes)
    if not isinstance(message, (wire.RankReady, wire.RankEnded)):
        return processes  # thousands a second
    fields: dict[str, Any] = {"status": "ready"}
    if isinstance(message, wire.RankEnded):
        how = {"exitcode": message.exitcode, "signal": message.signal}
        fields = {"status": "ended", **how}
    return tuple(replace(one, **fields) if one.rank == message.rank else one for one in processes)
