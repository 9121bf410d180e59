"""Explain a hang: from the stacks of silent ranks, find which ranks wait for which others.

    stack dump of each rank --read_stack--> RankStack --at_wait--> RankStack --find_hang--> Hang
    its newest collectives --differences, waits----------^

Stacks show what a rank waits for on its host. Where it waits for its device, behind a collective
that cannot end, its newest collectives show it. Ranks that agree give a number of a group to the
same operation. A rank differs that has not come to a number, gives it to another operation, or
other sizes to one that all of them wait in. A send or receive has no number: it waits for its
counterpart on one other rank.

The functions are pure. :class:`HangWatch` decides when ranks are asked, and what is shown::

    state --look--> HangWatch --asks--> the agents, which have their ranks dump stacks
                        ^-------------- take <-- Stacks, Collectives
                    HangWatch --> the state, with quiet ranks and the hang filled in

A healthy run is left alone: ranks are asked only once none of them has made a step or printed
anything for 8 seconds. If their stacks show no hang, they are asked again at growing intervals, up
to 60 seconds. A hang is reported once two dumps in a row agree, so that ranks which run many short
collectives are not taken to hang.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from notebook_accel import wire
from notebook_accel.launch.control.run_state import Hang, RankState, RunState
from notebook_accel.launch.control.stacks import frames_of_function, readable
from notebook_accel.launch.text.wording import rank_list
from notebook_accel.wire import Frame

# The functions of torch.distributed in which a rank waits for others.
_COLLECTIVES = frozenset(
    """
    all_gather all_gather_into_tensor all_gather_object all_gather_single all_reduce all_to_all
    all_to_all_single barrier broadcast broadcast_object_list destroy_process_group gather
    gather_object init_process_group irecv isend monitored_barrier new_group recv recv_object_list
    reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list
    send send_object_list
    """.split()  # noqa: SIM905 (a list of names is read more easily so)
)
_TORCH_DISTRIBUTED = re.compile(r"[/\\]torch[/\\](distributed|nn[/\\]parallel)[/\\]")
_OUR_TRAINING = re.compile(r"[/\\]notebook_accel[/\\]training[/\\]")
_OURS = re.compile(r"[/\\]notebook_accel[/\\](training|launch|notebook)[/\\]")
# Where ranks meet to save, by notes in a store.
_MEETS_TO_SAVE = re.compile(r"[/\\]checkpoint[/\\]saves\.py$")
_SAVES = ("save_state", "save_model")
# Files of libraries, ours included: the line that a person has to change is in none of them.
_LIBRARY = re.compile(
    rf"[/\\](site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]|{_OURS.pattern}|^<frozen "
)
# A frame of a formatted traceback; a cell has its label instead of a file.
_TRACED = re.compile(r'^  (?:File ")?(.+?)"?, line (\d+), in (.+)$', re.MULTILINE)
# Gradients are reduced in native code, below the call that computes them.
_BACKWARD = re.compile(r"[/\\]torch[/\\]autograd[/\\](graph|__init__)\.py$")
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
_MAX_SIZES = 60


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """Where a silent rank is in its code, and whether it waits for other ranks there.

    Attributes:
        operation: the collective in which the rank waits ("all_reduce"); "" if it waits in none.
        own_line: the innermost line of the user's own code ("Cell In[3], line 9"); "" if the rank
            gave no stack.
    """

    rank: int
    operation: str
    own_line: str
    is_idle: bool
    text: str = ""


def read_stack(rank: int, dump: str, labels: Mapping[str, str], *, cpu: int | None) -> RankStack:
    """Read from a stack dump where a rank is, and whether it waits in a collective there.

    Args:
        dump: the output of faulthandler for the rank; "" if it gave none.
        cpu: percent of a core that the rank uses; None if unknown.
    """
    frames = frames_of_function(dump)
    is_idle = cpu is not None and cpu < _IDLE_CPU
    index = _own_index(frames, labels)
    return RankStack(
        rank=rank,
        operation=_operation(frames[:index], is_idle=is_idle),
        own_line=_line(frames[index], labels) if frames else "",
        is_idle=is_idle or not frames,
        text=readable(dump, labels)[:_MAX_STACK],
    )


def at_wait(stack: RankStack, begun: wire.Collective, labels: Mapping[str, str]) -> RankStack:
    """Return where a rank is that waits for others in the collective that it began."""
    frames = begun.frames
    index = _own_index(frames, labels)
    of_stack = _operation(frames[:index], is_idle=True) if begun.peer is None else ""
    # A gradient's is begun by a thread of torch's own: the line is then where the rank stands.
    is_own = frames and not (
        frames[index].file not in labels and _LIBRARY.search(frames[index].file)
    )
    line = _line(frames[index], labels) if is_own else stack.own_line
    return replace(stack, operation=of_stack or begun.operation, own_line=line)


def text_of_difference(
    found: Difference, stacks: Sequence[RankStack], labels: Mapping[str, str]
) -> str:
    """Return where ranks differ as one sentence."""
    alike: dict[tuple[str, str], list[int]] = {}
    by_rank = {stack.rank: stack for stack in stacks}
    for rank, begun in found.begun.items():
        if rank in by_rank:
            at = at_wait(by_rank[rank], begun, labels)
            sizes = f" of {begun.sizes[:_MAX_SIZES]}" if begun.sizes.strip("[] ") else ""
            alike.setdefault((f"{begun.operation}{sizes}", at.own_line), []).append(rank)
    several = len(alike) > 1
    parts = [
        f"{what} on {rank_list(ranks)}{f', at {line}' if several else ''}"
        for (what, line), ranks in alike.items()
    ]
    behind: dict[int, list[int]] = {}
    for rank, last in found.behind.items():
        behind.setdefault(last, []).append(rank)
    parts += [
        f"{_with_verb(ranks, 'has', 'have')} come to {last or 'none'}"
        for last, ranks in sorted(behind.items())
    ]
    group = "" if len(found.ranks) == len(stacks) else f" of {rank_list(found.ranks)}"
    return f"Collective {found.number}{group} is {'; '.join(parts[:_MAX_PARTS])}"


def place_of_wait(traceback: str) -> str:
    """Return in which collective a rank waited when its connection to another rank broke.

    Returns:
        Text such as ``in gather at Cell In[3], line 9``; "" if the traceback has no collective.
    """
    found = reversed(_TRACED.findall(traceback))
    frames = [Frame(file, int(line), name) for file, line, name in found]
    index = _own_index(frames, {})
    ours = [frame.function for frame in frames[:index] if _OUR_TRAINING.search(frame.file)]
    operation = ours[-1] if ours else _operation(frames[:index], is_idle=True)
    return f"in {operation} at {_line(frames[index], {})}" if operation else ""


def _own_index(frames: Sequence[Frame], labels: Mapping[str, str]) -> int:
    """Return the index of the user's innermost frame, or of the outermost; -1 for none."""
    own = (i for i, f in enumerate(frames) if f.file in labels or not _LIBRARY.search(f.file))
    return next(own, len(frames) - 1)


def _line(frame: Frame, labels: Mapping[str, str]) -> str:
    # Where nothing of the person's runs yet: ranks of a session that make their group first.
    if _OURS.search(frame.file):
        return "the launcher's own code"
    return f"{labels.get(frame.file) or PurePath(frame.file).name}, line {frame.line}"


def _operation(frames: Sequence[Frame], *, is_idle: bool) -> str:
    """Return the name of the collective in which these frames wait; "" for none."""
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
    elif _BACKWARD.search(frames[0].file):
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
    difference: str = "",
) -> Hang | None:
    """Find why ranks are silent: which ranks wait, in which collective, and for which others.

    Args:
        silent: seconds since any rank last made progress.
        since: the time of that progress (``RunState.now``: wall time, seconds).
        difference: the first collective at which ranks differ, as a sentence; "" if unknown.

    Returns:
        The hang; None if no rank waits or is suspended. Also None if all ranks wait in the same
        collective at the same line, and have been silent for less than 30 seconds: the network may
        be slow.
    """
    held = suspended or {}
    waiting: dict[tuple[str, str], list[int]] = {}
    others: dict[str, list[int]] = {}
    for stack in stacks:
        if stack.operation:
            waiting.setdefault((stack.operation, stack.own_line), []).append(stack.rank)
        elif stack.rank not in held:
            place = f"at {stack.own_line}" if stack.own_line else "silent"
            others.setdefault(place, []).append(stack.rank)
    is_alone = len(waiting) == 1 and not (others or held or ended or difference)
    is_slow = is_alone and silent < _SLOW_SECONDS
    if is_slow or not (waiting or held):
        return None
    if not waiting:
        # No other rank waits for those that are suspended: they alone are named.
        stacks, others, ended = (), {}, ()
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
        pids = " ".join(map(str, held.values()))
        parts.append(
            f"{_with_verb([*held], 'is', 'are')} suspended, by SIGSTOP or a debugger: the "
            f"debugger, or `kill -CONT {pids}`, lets {'it' if len(held) == 1 else 'them'} go on"
        )
    if ended:
        parts.append(f"{_with_verb(ended, 'has', 'have')} ended")
    begin = "the run hangs: " if is_certain else "ranks wait for others, which are at work: "
    advice = "" if held or not is_certain else f". {_ADVICE}"
    first = f". {difference}" * bool(difference and waiting)
    # Where all ranks wait, at different places, the largest group is taken to be where all should
    # be: the ranks at every other place are elsewhere.
    elsewhere = {rank: place for place, ranks in others.items() for rank in ranks}
    if not others and not held:
        elsewhere = {rank: f"at {line}" for (_, line), ranks in groups[1:] for rank in ranks}
    return Hang(
        is_certain=is_certain,
        text=f"{begin if waiting else ''}{'; '.join(parts)}{first}{advice}",
        since=since,
        operations={one.rank: one.operation for one in stacks if one.operation},
        elsewhere=elsewhere,
        stacks=_alike(stacks),
    )


def _with_verb(ranks: Sequence[int], one: str, several: str) -> str:
    """Return the ranks and a verb in singular or plural: ``rank 2 waits``, ``ranks 0-3 wait``."""
    return f"{rank_list(ranks)} {one if len(ranks) == 1 else several}"


def _alike(stacks: Sequence[RankStack]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return a pair (ranks, stack as text) for each group of ranks at the same place."""
    found: dict[tuple[str, str], list[RankStack]] = {}
    for one in stacks:
        found.setdefault((one.operation, one.own_line), []).append(one)
    return tuple((tuple(one.rank for one in alike), alike[0].text) for alike in found.values())


# ---- the first collective at which ranks differ ---------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first number of one process group at which its ranks differ."""

    group: str
    number: int
    ranks: tuple[int, ...]
    begun: Mapping[int, wire.Collective]
    behind: Mapping[int, int]


def differences(answers: Mapping[int, wire.Collectives], num_ranks: int) -> list[Difference]:
    """Return where ranks differ first in each process group, the largest group first."""
    # Groups of other ranks may have the same name.
    begun: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, wire.Collective]]] = {}
    for rank, answer in answers.items():
        for one in answer.begun:
            if one.peer is None:
                key = one.group, one.ranks or tuple(range(num_ranks))
                begun.setdefault(key, {}).setdefault(rank, {})[one.number] = one
    found = (_first(*key, of_group, answers) for key, of_group in begun.items())
    return sorted((one for one in found if one), key=lambda one: -len(one.ranks))


def waits(
    answers: Mapping[int, wire.Collectives], found: Iterable[Difference]
) -> dict[int, wire.Collective]:
    """Return what each rank waits in behind a difference, or for a counterpart of another rank."""
    differing = {(one.group, rank) for one in found for rank in one.ranks}
    waiting: dict[int, wire.Collective] = {}
    for rank, answer in answers.items():
        for one in filter(lambda one: one.is_pending, answer.begun):
            is_point = one.peer is not None
            if _is_alone(rank, one, answers) if is_point else (one.group, rank) in differing:
                waiting.setdefault(rank, one)
    return waiting


def _is_alone(rank: int, point: wire.Collective, answers: Mapping[int, wire.Collectives]) -> bool:
    """Whether the other rank of a send or receive has begun no counterpart."""
    other = answers.get(point.peer) if point.peer is not None else None
    return not other or not any(
        one.group == point.group and one.peer == rank and one.operation[:4] != point.operation[:4]
        for one in other.begun
    )


def _first(
    group: str,
    ranks: tuple[int, ...],
    begun: Mapping[int, Mapping[int, wire.Collective]],
    answers: Mapping[int, wire.Collectives],
) -> Difference | None:
    newest = {rank: max(begun.get(rank, [0])) for rank in ranks}
    for number in sorted({number for of_rank in begun.values() for number in of_rank}):
        here = {rank: of_rank[number] for rank, of_rank in begun.items() if number in of_rank}
        behind = {rank: last for rank, last in newest.items() if last < number}
        is_pending = any(one.is_pending for one in here.values())
        is_other = len({one.operation for one in here.values()}) > 1
        # Of operations to which all ranks give inputs of the same sizes.
        has_sizes = {
            one.sizes
            for one in here.values()
            if "to" not in one.operation.split("_")
            and ("scatter" not in one.operation or "reduce_scatter" in one.operation)
        }
        if is_other or (is_pending and (behind or len(has_sizes) > 1)):
            return Difference(
                group=group,
                number=number,
                ranks=ranks,
                begun=dict(sorted(here.items())),
                # One that gave no answer may have come so far; its place is told otherwise.
                behind={rank: last for rank, last in behind.items() if rank in answers},
            )
    return None


# ---- when ranks are asked, and what the state has of it --------------------------------------

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
    """Adds to a call's state which ranks are quiet, and which hang in a collective."""

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
        self._begun: dict[int, wire.Collectives] = {}
        # Who waited where by the dumps before: rank, operation, line.
        self._before: list[tuple[int, str, str]] = []

    def take(self, message: wire.Stacks | wire.Collectives) -> None:
        """Keep a rank's answer for the next :meth:`look`; ignored if none was asked for."""
        if message.rank is None or self._asked is None:
            return
        if isinstance(message, wire.Collectives):
            self._begun[message.rank] = message
        else:
            self._dumps[message.rank] = message.text

    def asks(self, state: RunState, *, now: float) -> bool:
        """Return whether it is time to ask the ranks for their stacks.

        If True, the caller must ask the ranks now: :meth:`look` waits for their answers.
        """
        if not self._is_silent(state, now) or self._asked is not None or now < self._next:
            return False
        self._asked = now
        self._dumps, self._begun = {}, {}
        return True

    def look(self, state: RunState, *, now: float) -> RunState:
        """Return the state with quiet ranks and the hang; the same object if unchanged."""
        if state.status != "running":
            # Ranks that were asked to leave are no longer looked at. A hang that was found before
            # stays in the state: it tells why somebody wanted the end.
            # Nobody is quiet for the time of a pause.
            self._moved = {} if state.status == "paused" else self._moved
            return state
        before = state.ranks if self._seen is None else self._seen.ranks
        for old, rank in zip(before, state.ranks, strict=True):
            if rank.rank not in self._moved or _has_moved(old, rank):
                self._moved[rank.rank] = now
        changed = list(state.ranks)
        for index, rank in enumerate(changed):
            quiet = now - self._moved[rank.rank]
            is_quiet = quiet >= _QUIET_SECONDS and not rank.has_ended
            if is_quiet != (rank.quiet_since is not None):
                since = state.now() - quiet if is_quiet else None
                changed[index] = replace(rank, quiet_since=since)
        if any(new is not old for new, old in zip(changed, state.ranks, strict=True)):
            state = replace(state, ranks=tuple(changed))
        if not self._is_silent(state, now):
            self._asked, self._before, self._wait = None, [], _AGAIN_SECONDS
            self._next = 0.0
            # A rank that is suspended is named where others go on, or where there is no other.
            state = _with_hang(state, self._find([], state, now))
        elif self._asked is not None:
            alive = [rank for rank in state.ranks if not rank.has_ended]
            both = self._dumps, self._begun
            has_all = all(rank.rank in kept for rank in alive for kept in both)
            if has_all or now >= self._asked + _ANSWER_SECONDS:
                state = self._judge(state, alive, now)
        self._seen = state
        return state

    def _is_silent(self, state: RunState, now: float) -> bool:
        if state.status != "running" or state.world_size == 1 or not self._moved:
            return False
        return now - max(self._moved.values()) >= _SILENT_SECONDS

    def _judge(self, state: RunState, alive: Sequence[RankState], now: float) -> RunState:
        """Return the state with the hang of the newest dumps, if the previous dumps show it too.

        If they do not show it, the state has no hang, or one that only names suspended ranks.
        """
        stacks = [
            read_stack(rank.rank, self._dumps.get(rank.rank, ""), self._labels, cpu=rank.cpu)
            for rank in alive
        ]
        found_first = differences(self._begun, state.world_size)
        where_they_differ = (
            text_of_difference(found_first[0], stacks, self._labels) if found_first else ""
        )
        begun = waits(self._begun, found_first)
        stacks = [
            at_wait(one, begun[one.rank], self._labels) if one.rank in begun else one
            for one in stacks
        ]
        found = self._find(stacks, state, now, where_they_differ)
        where = [(one.rank, one.operation, one.own_line) for one in stacks if one.operation]
        is_same, self._before = where == self._before, where
        if found is None or is_same:
            self._wait = min(2 * self._wait, _MAX_AGAIN_SECONDS)
        self._asked, self._next = None, now + self._wait
        return _with_hang(state, found if is_same else self._find([], state, now))

    def _find(
        self, stacks: Sequence[RankStack], state: RunState, now: float, difference: str = ""
    ) -> Hang | None:
        silent = now - max(self._moved.values(), default=now)
        return find_hang(
            stacks,
            ended=[rank.rank for rank in state.ranks if rank.has_ended],
            silent=silent,
            since=state.now() - silent,
            difference=difference,
            suspended={
                rank.rank: rank.pid
                for rank in state.ranks
                if rank.is_suspended and rank.pid is not None and rank.quiet_since is not None
            },
        )


def _with_hang(state: RunState, hang: Hang | None) -> RunState:
    if hang is not None and state.hang is not None and hang.text == state.hang.text:
        hang = state.hang
    return state if hang is state.hang else replace(state, hang=hang)


def _has_moved(before: RankState, rank: RankState) -> bool:
    """Return whether a rank made progress or printed something between two of its states."""
    has_said = before.metrics is not rank.metrics or before.displays is not rank.displays
    counts = [(one.status, one.batches, one.steps, one.log_end) for one in (before, rank)]
    if has_said or counts[0] != counts[1]:
        return True
    # A bar that is only drawn again, as tqdm does now and then, says nothing new.
    bars = [[(bar.bar, bar.n, bar.closed, bar.name) for bar in one.bars] for one in (before, rank)]
    return bars[0] != bars[1]
