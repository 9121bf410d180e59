"""Where the time of training steps goes, as all views show it: a small table, and what stands out.

Ranks that train together wait for the slowest one in their collectives, so that all their steps are
equally long. The slow rank is the one that waits least there, or that waits for data.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import TypeAlias

import msgspec

from notebook_accel.launch.control.run_state import RunState
from notebook_accel.launch.text import wording

_PARTS = ("data", "forward", "backward", "collectives", "optimizer", "rest")
# Of so many ranks each has a row; of more, the slowest one and the median have.
_MAX_ROWS = 4
# Steps before anything is shown. Parts of a step: more than other ranks take, and data for all.
_MIN_STEPS, _MUCH, _MUCH_DATA = 5, 0.1, 0.3
# Part of a device's memory from which on it is nearly full.
_FULL = 0.9

# Nanoseconds a step, by the fields of `wire.StepTimes`; and the bytes "peak" and "limit".
_Means: TypeAlias = "dict[str, float]"


def step_table(state: RunState) -> list[tuple[str, ...]]:
    """Return the table of steps: a head, and a row for each rank; [] before there are five steps.

    Of more than four ranks, the slowest and the median have a row. Devices that tell their memory
    add a column.
    """
    means = _means_of(state)
    shown = {str(rank): own for rank, own in means.items()}
    if len(means) > _MAX_ROWS:
        slow = _slowest(means)[2]
        shown = {f"{slow}, the slowest": means[slow], "median": _usual(means.values())}
    table: list[tuple[str, ...]] = [("rank", "a step", *_PARTS, "peak memory")] if shown else []
    for name, own in shown.items():
        seconds = own["total"] / 1e9
        step = wording.span(seconds) if seconds >= 10 else f"{seconds * 1e3:,.1f} ms"
        table.append((name, step, *(_share(own, part) for part in _PARTS), _peak(own)))
    has_memory = any(own["limit"] for own in shown.values())
    return table if has_memory else [row[:-1] for row in table]


def step_lines(state: RunState) -> list[str]:
    """Return sentences on what slows the steps down, and on device memory that is nearly full."""
    means = _means_of(state)
    full = {rank: own for rank, own in means.items() if own["peak"] > _FULL * own["limit"] > 0}
    lines = [_on_speed(means)] if means else []
    if full:
        peak = _peak(max(full.values(), key=lambda own: own["peak"] / own["limit"]))
        lines.append(
            f"device memory of {wording.rank_list(full)} is nearly full, {peak} at the peak"
        )
    return [line for line in lines if line]


def _means_of(state: RunState) -> dict[int, _Means]:
    means = {}
    for rank in state.ranks:
        times = msgspec.structs.asdict(rank.step_times)
        if times["num_steps"] >= _MIN_STEPS:
            means[rank.rank] = {name: spent / times["num_steps"] for name, spent in times.items()}
            means[rank.rank] |= {"peak": rank.device_peak or 0, "limit": rank.device_limit or 0}
    return means


def _usual(means: Iterable[_Means]) -> _Means:
    means = list(means)
    return {name: median(own[name] for own in means) for name in means[0]}


def _share(own: _Means, part: str) -> str:
    return f"{own[part] / own['total']:.0%}"


def _peak(own: _Means) -> str:
    memory = (wording.memory(int(own[name])) for name in ("peak", "limit"))
    return " of ".join(memory) if own["limit"] else ""


def _slowest(means: dict[int, _Means]) -> tuple[float, str, int]:
    """Return the slow rank, behind the reason, and the part of a step that it takes longer."""
    found = []
    for rank in {
        max(means, key=lambda rank: means[rank]["data_wait"]),
        min(means, key=lambda rank: means[rank]["collectives"]),
    }:
        own, usual = means[rank], _usual(means[other] for other in means if other != rank)
        waited = usual["collectives"] - own["collectives"]
        # What the others do not wait for is not slow: collectives that are not measured, as those
        # of a sharded forward, may be in its parts.
        reasons = ("forward", "backward", "optimizer", "rest")
        more = {part: min(own[part] - usual[part], waited) for part in reasons}
        more |= {"data_wait": own["data_wait"] - usual["data_wait"]}
        reason = max(more, key=lambda part: more[part])
        if more[reason] < waited / 2:
            more[""], reason = waited, ""
        found.append((more[reason] / own["total"], reason, rank))
    return max(found)


def _on_speed(means: dict[int, _Means]) -> str:
    if len(means) > 1:
        much, reason, rank = _slowest(means)
        if much >= _MUCH and reason == "data_wait":
            return f"rank {rank} waits {_share(means[rank], reason)} of each step for data"
        if much >= _MUCH:
            what = f"{rank}'s {reason}" if reason else f"{rank}"
            others = [other for other in means if other != rank]
            who = "the others wait" if len(others) > 1 else f"rank {others[0]} waits"
            return f"{who} {much:.0%} of each step for rank {what}"
    usual = _usual(means.values())
    if usual["data_wait"] < _MUCH_DATA * usual["total"]:
        return ""
    who = "all ranks wait" if len(means) > 1 else "the training waits"
    return f"{who} {_share(usual, 'data_wait')} of each step for data (try more num_workers)"
