"""Who waits for whom: from the stacks of ranks that are silent to what a person is told.

    a dump of each rank --read_stack--> RankStack --find_hang--> Hang

    state --look--> HangWatch --asks--> the agents, which dump stacks
                        ^-------------- take <-- Stacks
                    HangWatch --> the state, with who is quiet and who waits for whom

A healthy run is left alone: ranks are asked only once none of them has made a step or said a word
for some seconds, then ever more rarely while nobody waits for another. A hang is told once two
dumps say the same, so that ranks which pass through many short collectives are not taken for one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.control.stacks import Frame, frames_of_function, readable
from notebook_accel.launch.text.wording import rank_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_accel.launch import wire
    from notebook_accel.launch.control.state import RankState, RunState

__all__ = ["Hang", "HangWatch", "RankStack", "find_hang", "place_of_wait", "read_stack"]


# A rank is shown as quiet after this time: longer than a step of most trainings.
_QUIET_SECONDS = 5.0
# Ranks are asked for their stacks after `_SILENT_SECONDS`, and once more `_AGAIN_SECONDS` later: a
# hang is told some 10 seconds after the last step, or 18 where a rank gives no answer.
_SILENT_SECONDS = 8.0
_AGAIN_SECONDS = 2.0
# A run that computes for minutes is asked ever more rarely, down to this: a dump wakes all ranks.
_MAX_AGAIN_SECONDS = 60.0
# An agent waits three seconds for the dump of a rank that does not answer.
_ANSWER_SECONDS = 4.0


class HangWatch:
    """Watches the ranks of one call.

    Args:
        labels: what a person calls each cell, by the name of its file.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        # When each rank made a step or said something last; monotonic seconds, as all times here.
        self._moved: dict[int, float] = {}
        # The state of the turn before: what differs from it has moved.
        self._seen: RunState | None = None
        # When the ranks were asked, while answers are waited for; and when they are asked next.
        self._asked: float | None = None
        self._next = 0.0
        self._wait = _AGAIN_SECONDS
        self._dumps: dict[int, str] = {}
        # Who waited where by the dumps before: rank, operation, line.
        self._before: list[tuple[int, str, str]] = []

    def take(self, message: wire.Stacks) -> None:
        """Keep the stack of a rank."""
        if message.rank is not None and self._asked is not None:
            self._dumps[message.rank] = message.text

    def asks(self, state: RunState, *, now: float) -> bool:
        """Whether the ranks are to be asked for their stacks now; whoever gets True asks them.

        Args:
            state: the newest.
            now: ``time.monotonic()``.
        """
        if not self._is_silent(state, now) or self._asked is not None or now < self._next:
            return False
        self._asked = now
        self._dumps = {}
        return True

    def look(self, state: RunState, *, now: float) -> RunState:
        """The state with what is known of quiet ranks; the same object where that is nothing new.

        Args:
            state: the newest.
            now: ``time.monotonic()``.
        """
        if state.status != "running":
            # Ranks that were asked to leave are no longer looked at. A hang that was found before
            # stays in the state: it tells why somebody wanted the end.
            return state
        if state is not self._seen:
            self._note_moves(state, now)
        changed = tuple(self._with_quiet(rank, state, now) for rank in state.ranks)
        if any(new is not old for new, old in zip(changed, state.ranks, strict=True)):
            state = replace(state, ranks=changed)
        if not self._is_silent(state, now):
            self._asked, self._before, self._wait = None, [], _AGAIN_SECONDS
            self._next = 0.0
            # A rank that is suspended is named where others go on, or where there is no other.
            state = _with_hang(state, self._find([], state, now))
        elif self._asked is not None and self._has_answers(state, now):
            state = self._judge(state, now)
        self._seen = state
        return state

    def _note_moves(self, state: RunState, now: float) -> None:
        before = state.ranks if self._seen is None else self._seen.ranks
        for old, rank in zip(before, state.ranks, strict=True):
            if rank.rank not in self._moved or _has_moved(old, rank):
                self._moved[rank.rank] = now

    def _with_quiet(self, rank: RankState, state: RunState, now: float) -> RankState:
        quiet = now - self._moved[rank.rank]
        is_quiet = quiet >= _QUIET_SECONDS and not rank.has_ended
        if is_quiet == (rank.quiet_since is not None):
            return rank
        return replace(rank, quiet_since=state.now() - quiet if is_quiet else None)

    def _is_silent(self, state: RunState, now: float) -> bool:
        """Whether no rank of several has moved for so long that they are asked why."""
        if state.status != "running" or state.world_size == 1 or not self._moved:
            return False
        return now - max(self._moved.values()) >= _SILENT_SECONDS

    def _has_answers(self, state: RunState, now: float) -> bool:
        assert self._asked is not None
        alive = [rank.rank for rank in state.ranks if not rank.has_ended]
        return now >= self._asked + _ANSWER_SECONDS or all(rank in self._dumps for rank in alive)

    def _judge(self, state: RunState, now: float) -> RunState:
        """The state with what the dumps tell, once two in a row tell the same."""
        stacks = [
            self._read(rank, self._dumps.get(rank.rank, ""))
            for rank in state.ranks
            if not rank.has_ended
        ]
        found = self._find(stacks, state, now)
        where = [(one.rank, one.operation, one.own_line) for one in stacks if one.operation]
        is_same, self._before = where == self._before, where
        if found is None or is_same:
            self._wait = min(2 * self._wait, _MAX_AGAIN_SECONDS)
        self._asked, self._next = None, now + self._wait
        return _with_hang(state, found if is_same else self._find([], state, now))

    def _find(self, stacks: Sequence[RankStack], state: RunState, now: float) -> Hang | None:
        silent = now - max(self._moved.values(), default=now)
        return find_hang(
            stacks,
            ended=[rank.rank for rank in state.ranks if rank.has_ended],
            silent=silent,
            since=state.now() - silent,
            suspended={
                rank.rank: rank.pid
                for rank in state.ranks
                if rank.is_suspended and rank.pid is not None and rank.quiet_since is not None
            },
        )

    def _read(self, rank: RankState, dump: str) -> RankStack:
        text = readable(dump, self._labels)
        return read_stack(rank.rank, dump, self._labels, cpu=rank.cpu, text=text)


def _with_hang(state: RunState, hang: Hang | None) -> RunState:
    if hang is not None and state.hang is not None and hang.text == state.hang.text:
        hang = state.hang
    return state if hang is state.hang else replace(state, hang=hang)


def _has_moved(before: RankState, rank: RankState) -> bool:
    """Whether a rank made a step or said something between two states of it."""
    has_said = before.metrics is not rank.metrics or before.displays is not rank.displays
    if has_said or _counts(before) != _counts(rank):
        return True
    # A bar that is only drawn again, as tqdm does now and then, says nothing new.
    return before.bars is not rank.bars and _bars(before) != _bars(rank)


def _counts(rank: RankState) -> tuple[Any, ...]:
    return (rank.status, rank.batches, rank.steps, rank.log_end)


def _bars(rank: RankState) -> list[tuple[Any, ...]]:
    return [(bar.bar, bar.n, bar.closed, bar.name) for bar in rank.bars]


# The functions of torch.distributed in which a rank waits for others.
_COLLECTIVES = frozenset(
    """
    all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single
    barrier broadcast broadcast_object_list destroy_process_group gather gather_object
    init_process_group irecv isend monitored_barrier new_group recv recv_object_list reduce
    reduce_scatter reduce_scatter_tensor scatter scatter_object_list send send_object_list
    """.split()  # noqa: SIM905 (a list of names is read more easily so)
)
_TORCH_DISTRIBUTED = re.compile(r"[/\\]torch[/\\](distributed|nn[/\\]parallel)[/\\]")
_OUR_TRAINING = re.compile(r"[/\\]notebook_accel[/\\]training[/\\]")
_OURS = re.compile(r"[/\\]notebook_accel[/\\](training|launch|notebook)[/\\]")
# Where ranks meet to save, by notes in a store.
_MEETS_TO_SAVE = re.compile(r"[/\\]checkpoint[/\\]joint_save\.py$")
_SAVES = ("save_state", "save_model")
# Files of libraries, ours included: the line that a person has to change is in none of them.
_LIBRARY = re.compile(
    rf"[/\\](site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]|{_OURS.pattern}|^<frozen "
)
# A frame of a formatted traceback; a cell has its label instead of a file.
_TRACED = re.compile(r'^  (?:File ")?(.+?)"?, line (\d+), in (.+)$', re.MULTILINE)
# Gradients are reduced in native code, below the call that computes them.
_BACKWARD = "_engine_run_backward"
# Percent of a core, below which a rank does nothing. One that waits in gloo uses next to none.
_IDLE_CPU = 10
# A slow network may take this long for one operation: ranks that all wait in the same one are taken
# to hang only after that.
_SLOW_SECONDS = 30.0
_ADVICE = "Every rank must make the same collective calls in one order"
# The most characters of a stack, and the most places in the sentence: one message to the panel has
# 20 KB for all of it.
_MAX_STACK = 4_000
_MAX_PARTS = 6


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """What the stack of a rank that says nothing tells.

    Attributes:
        operation: what it waits for the others in ("all_reduce"); "" where it does not.
        own_line: the newest line of the person's own code; "" where the rank gave no answer.
        is_idle: whether it uses no processor time to speak of.
        text: the whole stack, for a person.
    """

    rank: int
    operation: str
    own_line: str
    is_idle: bool
    text: str = ""

    @property
    def place(self) -> str:
        """Where it is, for a person."""
        return f"at {self.own_line}" if self.own_line else "silent"


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Ranks that wait for others in vain, as it seems.

    Attributes:
        is_certain: whether the waiting ranks can hardly ever go on: all others do nothing, or
            have ended. If False, another rank is at work, and may come yet.
        text: who waits in what for whom, and where.
        since: when the last rank made its last step, by the clock of the run (wall, seconds).
        operations: in what each rank waits, by its number.
        elsewhere: the ranks for which the others wait, each with where it is ("at Cell In[3],
            line 9"); none that has ended.
        stacks: each different stack as text, behind the ranks that have it.
    """

    is_certain: bool
    text: str
    since: float
    operations: dict[int, str]
    elsewhere: dict[int, str]
    stacks: tuple[tuple[tuple[int, ...], str], ...]


def read_stack(
    rank: int, dump: str, labels: Mapping[str, str], *, cpu: int | None, text: str
) -> RankStack:
    """What the stack of a rank tells.

    Args:
        rank: its number.
        dump: what faulthandler wrote of it.
        labels: what a person calls each cell, by the name of its file.
        cpu: percent of a core that the rank uses; None where nobody knows.
        text: the dump as a person reads it.
    """
    frames = frames_of_function(dump)
    is_idle = cpu is not None and cpu < _IDLE_CPU
    index = _own_index(frames, labels)
    return RankStack(
        rank=rank,
        operation=_operation(frames[:index], is_idle=is_idle),
        own_line=_line(frames[index], labels) if frames else "",
        is_idle=is_idle or not frames,
        text=text[:_MAX_STACK],
    )


def place_of_wait(traceback: str) -> str:
    """``in gather at Cell In[3], line 9``, of a traceback of an error in which a rank lost others
    for which it waited; "" where it shows no such place."""
    found = reversed(_TRACED.findall(traceback))
    frames = [Frame(file=file, line=int(line), function=name) for file, line, name in found]
    index = _own_index(frames, {})
    ours = [frame.function for frame in frames[:index] if _OUR_TRAINING.search(frame.file)]
    operation = ours[-1] if ours else _operation(frames[:index], is_idle=True)
    return f"in {operation} at {_line(frames[index], {})}" if operation else ""


def _own_index(frames: Sequence[Frame], labels: Mapping[str, str]) -> int:
    """Which frame is the newest of the person's own code, or else the oldest."""
    own = (i for i, f in enumerate(frames) if f.file in labels or not _LIBRARY.search(f.file))
    return next(own, len(frames) - 1)


def _line(frame: Frame, labels: Mapping[str, str]) -> str:
    # Where nothing of the person's runs yet: ranks of a session that make their group first.
    if _OURS.search(frame.file):
        return "the launcher's own code"
    return f"{labels.get(frame.file) or PurePath(frame.file).name}, line {frame.line}"


def _operation(frames: Sequence[Frame], *, is_idle: bool) -> str:
    """In what the frames above the person's own code wait for other ranks; "" for nothing."""
    in_torch = [frame for frame in frames if _TORCH_DISTRIBUTED.search(frame.file)]
    # The newest frame is first. So the last of these is the one that was called, and those before
    # it are calls that it makes inside.
    collectives = [frame.function for frame in in_torch if frame.function in _COLLECTIVES]
    ours = [frame.function for frame in frames if _OUR_TRAINING.search(frame.file)]
    if any(frame.function == "meet" and _MEETS_TO_SAVE.search(frame.file) for frame in frames):
        return ours[-1]
    if collectives:
        name = collectives[-1]
    elif not (is_idle and frames):
        return ""
    elif frames[0].function == _BACKWARD:
        name = "backward"
    elif frames[0] in in_torch:
        name = frames[0].function
    else:
        return ""
    return f"{name} ({ours[-1]})" if ours and ours[-1] != name else name


def find_hang(
    stacks: Sequence[RankStack],
    *,
    ended: Sequence[int],
    silent: float,
    since: float,
    suspended: Mapping[int, int] | None = None,
) -> Hang | None:
    """What to tell of ranks that say nothing; None where nobody waits for another and none is
    suspended, or where all wait in one place and have not done so for long.

    Args:
        stacks: of every rank whose part of the call goes on.
        ended: the ranks whose part has ended.
        silent: seconds since any rank made its last step.
        since: when that was, by the clock of the run.
        suspended: the process of each rank that SIGSTOP or a debugger holds.
    """
    held = suspended or {}
    waiting: dict[tuple[str, str], list[int]] = {}
    others: dict[str, list[int]] = {}
    for stack in stacks:
        if stack.operation:
            waiting.setdefault((stack.operation, stack.own_line), []).append(stack.rank)
        elif stack.rank not in held:
            others.setdefault(stack.place, []).append(stack.rank)
    if not waiting:
        return _only_suspended(held, since) if held else None
    if len(waiting) == 1 and not (others or held or ended) and silent < _SLOW_SECONDS:
        return None
    groups = sorted(waiting.items(), key=lambda item: (-len(item[1]), item[1]))
    is_certain = all(one.is_idle for one in stacks if not one.operation)
    parts = [
        f"{_with_verb(ranks, 'waits', 'wait')} in {operation} at {line}"
        + (" (call it on every rank: take the `if` out)" if operation in _SAVES else "")
        for (operation, line), ranks in groups
    ]
    parts += [f"{_with_verb(ranks, 'is', 'are')} {place}" for place, ranks in others.items()]
    if len(parts) > _MAX_PARTS:
        parts[_MAX_PARTS:] = [f"and so on, at {len(parts) - _MAX_PARTS} more places"]
    if held:
        parts.append(_suspended(held))
    if ended:
        parts.append(f"{_with_verb(ended, 'has', 'have')} ended")
    begin = "the run hangs" if is_certain else "ranks wait for others, which are at work"
    advice = "" if held or not is_certain else f". {_ADVICE}"
    # Where all ranks wait, at different places, the largest group is taken to be where all should
    # be: the ranks at every other place are elsewhere.
    elsewhere = {rank: place for place, ranks in others.items() for rank in ranks}
    if not others and not held:
        elsewhere = {rank: f"at {line}" for (_, line), ranks in groups[1:] for rank in ranks}
    return Hang(
        is_certain=is_certain,
        text=f"{begin}: {'; '.join(parts)}{advice}",
        since=since,
        operations={one.rank: one.operation for one in stacks if one.operation},
        elsewhere=elsewhere,
        stacks=_alike(stacks),
    )


def _only_suspended(held: Mapping[int, int], since: float) -> Hang:
    """What to tell where no rank waits for those that are suspended, or where there is no other."""
    return Hang(
        is_certain=True,
        text=_suspended(held),
        since=since,
        operations={},
        elsewhere={},
        stacks=(),
    )


def _suspended(held: Mapping[int, int]) -> str:
    pids = " ".join(map(str, held.values()))
    return (
        f"{_with_verb([*held], 'is', 'are')} suspended, by SIGSTOP or a debugger: the debugger, or "
        f"`kill -CONT {pids}`, lets {'it' if len(held) == 1 else 'them'} go on"
    )


def _with_verb(ranks: Sequence[int], one: str, several: str) -> str:
    """``rank 2 waits``, ``ranks 0-3 wait``."""
    return f"{rank_list(ranks)} {one if len(ranks) == 1 else several}"


def _alike(stacks: Sequence[RankStack]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Each different stack once, behind the ranks that wait in the same operation and line."""
    found: dict[tuple[str, str], list[RankStack]] = {}
    for one in stacks:
        found.setdefault((one.operation, one.own_line), []).append(one)
    return tuple((tuple(one.rank for one in alike), alike[0].text) for alike in found.values())
