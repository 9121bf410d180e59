"""Decide when silent ranks are asked for their stacks, and when to report a hang.

    state --look--> HangWatch --asks--> the agents, which have their ranks dump stacks
                        ^-------------- take <-- Stacks, Collectives
                    HangWatch --> the state, with quiet ranks and the hang filled in

A healthy run is left alone: ranks are asked only once none of them has made a step or printed
anything for 8 seconds. If their stacks show no hang, they are asked again at growing intervals, up
to 60 seconds. A hang is reported once two dumps in a row agree, so that ranks which run many short
collectives are not taken to hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from notebook_accel import wire
from notebook_accel.launch.control.hang import (
    Hang,
    RankStack,
    at_waits,
    differences,
    find_hang,
    read_stack,
    text_of_difference,
    waits,
)
from notebook_accel.launch.control.run_state import RankState, RunState

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
            return state
        before = state.ranks if self._seen is None else self._seen.ranks
        for old, rank in zip(before, state.ranks, strict=True):
            if rank.rank not in self._moved or _has_moved(old, rank):
                self._moved[rank.rank] = now
        changed = tuple(self._with_quiet(rank, state, now) for rank in state.ranks)
        if any(new is not old for new, old in zip(changed, state.ranks, strict=True)):
            state = replace(state, ranks=changed)
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

    def _with_quiet(self, rank: RankState, state: RunState, now: float) -> RankState:
        quiet = now - self._moved[rank.rank]
        is_quiet = quiet >= _QUIET_SECONDS and not rank.has_ended
        if is_quiet == (rank.quiet_since is not None):
            return rank
        return replace(rank, quiet_since=state.now() - quiet if is_quiet else None)

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
        stacks = at_waits(stacks, waits(self._begun, found_first), self._labels)
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
    if has_said or _counts(before) != _counts(rank):
        return True
    # A bar that is only drawn again, as tqdm does now and then, says nothing new.
    return before.bars is not rank.bars and _bars(before) != _bars(rank)


def _counts(rank: RankState) -> tuple[Any, ...]:
    return (rank.status, rank.batches, rank.steps, rank.log_end)


def _bars(rank: RankState) -> list[tuple[Any, ...]]:
    return [(bar.bar, bar.n, bar.closed, bar.name) for bar in rank.bars]
