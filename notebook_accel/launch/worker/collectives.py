"""A rank's newest collectives, by torch's flight recorder: who waits for whom is read from them.

With NCCL and its kin a collective returns at once, and the rank then waits for its device below a
line of the user's that is no collective. The recorder has the line that began it.
"""

from __future__ import annotations

import re
import sys
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accel.launch import wire
from notebook_accel.private import of_torch

if TYPE_CHECKING:
    from collections.abc import Callable

# Of each group so many collectives before and after the first that is not done.
_NUM_AROUND = 8
# The user's line is rarely deeper below a collective.
_MAX_FRAMES = 80
# It calls the user's function.
_CALLER = str(Path(__file__).with_name("main.py"))
# What torch calls them inside.
_PLAIN_NAMES = {
    "all_gather_base": "all_gather_into_tensor",
    "reduce_scatter_base": "reduce_scatter_tensor",
}
# NCCL's names of what two ranks of a group do; gloo's are not recorded.
_POINT_TO_POINT = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")


def newest(
    *, since: float, notice: Callable[[str], None]
) -> tuple[dict[str, list[int]], tuple[wire.Collective, ...]]:
    """Return the ranks of each process group, and its collectives around the first that is pending.

    Both are empty in a process without torch's process groups.

    Args:
        since: wall time, seconds; what began before belongs to groups that are gone.
        notice: tells the user a line. One in the log would count as a sign of life.
    """
    if "torch.distributed.distributed_c10d" not in sys.modules:
        return {}, ()
    begun: dict[str, dict[int, wire.Collective]] = {}
    ranks = of_torch.ranks_of_groups()
    groups: dict[str, list[int]] = {}
    # By group, those after the last that is done: parts of a batch are never said to be done.
    points: dict[str, list[wire.Collective]] = {}
    recorded = of_torch.recorded_collectives()
    if recorded is None:
        notice(
            "this torch has no flight recorder: where ranks wait is read from their stacks alone"
        )
    for entry in recorded or ():
        if entry["time_created_ns"] < since * 1e9:
            continue
        one = _collective(entry, ranks)
        if entry["is_p2p"]:
            of_points = points.setdefault(one.group, [])
            if not one.is_pending:
                is_batch = one.peer is None
                of_points[:] = [
                    old for old in of_points if not (is_batch or old.operation == one.operation)
                ]
            elif one.peer is not None:
                of_points.append(one)
            continue
        of_group = begun.setdefault(one.group, {})
        if of_group and one.number < max(of_group):  # a new group of an old one's name
            of_group.clear()
        of_group[one.number] = one
        if entry["process_group"][0] in ranks:
            groups[one.group] = ranks[entry["process_group"][0]]
    around = [_around([*of_group.values()]) for of_group in begun.values()]
    return groups, tuple(chain(*around, *(several[:_NUM_AROUND] for several in points.values())))


def _around(begun: list[wire.Collective]) -> list[wire.Collective]:
    first = next((i for i, one in enumerate(begun) if one.is_pending), len(begun))
    kept = begun[max(0, first - _NUM_AROUND) : first + _NUM_AROUND]
    return kept if kept[-1] is begun[-1] else [*kept, begun[-1]]


def _collective(entry: dict[str, Any], ranks: dict[str, list[int]]) -> wire.Collective:
    backend, _, name = entry["profiling_name"].rpartition(":")
    name, peer = name.lstrip("_"), None
    group = entry["process_group"][0]
    if found := _POINT_TO_POINT.fullmatch(name):
        peer = ranks[group][int(found[2])] if group in ranks else int(found[2])
        name = f"{found[1]} {'from' if found[1] == 'recv' else 'to'} rank {peer}"
    frames = takewhile(lambda frame: frame["filename"] != _CALLER, entry.get("frames", ()))
    return wire.Collective(
        group=f"{group} {backend}",
        peer=peer,
        number=entry["collective_seq_id"],
        operation=_PLAIN_NAMES.get(name, name),
        sizes=" ".join(map(str, entry["input_sizes"])),
        is_pending=not entry["retired"],
        frames=tuple((frame["filename"], frame["line"], frame["name"]) for frame in frames)[
            :_MAX_FRAMES
        ],
    )
