"""A rank's newest collectives, by torch's flight recorder: who waits for whom is read from them.

With NCCL and its kin a collective returns at once, and the rank then waits for its device below a
line of the user's that is no collective. The recorder has the line that began it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from notebook_accel import wire
from notebook_accel.private import of_torch
from notebook_accel.rank.this_rank import has_process_group

# Of each group so many collectives before and after the first that is not done.
_NUM_AROUND = 8
# The user's line is rarely deeper below a collective.
_MAX_FRAMES = 80
# It calls the user's function.
_CALLER = str(Path(__file__).with_name("main.py"))
# What torch calls them inside.
_PLAIN_NAMES = {
    "all_gather_base": "all_gather_into_tensor",
    "all_reduce_barrier": "barrier",
    "reduce_scatter_base": "reduce_scatter_tensor",
}
# NCCL's names of what two ranks of a group do, as "recv 0<-1"; gloo's are not recorded.
_POINT_TO_POINT = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")


def newest(*, since: float, notice: Callable[[str], None]) -> tuple[wire.Collective, ...]:
    """Return the collectives of each process group around the first that is pending.

    There are none in a process without a process group.

    Args:
        since: wall time, seconds; what began before belongs to groups that are gone.
        notice: tells the user a line. One in the log would count as a sign of life.
    """
    if not has_process_group():
        return ()
    recorded = of_torch.recorded_collectives()
    if recorded is None:
        notice(
            "this torch has no flight recorder: where ranks wait is read from their stacks alone"
        )
    ranks = of_torch.ranks_of_groups()
    begun: dict[str, list[wire.Collective]] = defaultdict(list)
    # By group, those after the last batch that is done: its parts are never said to be done.
    points: dict[str, list[wire.Collective]] = defaultdict(list)
    last: dict[str, wire.Collective] = {}
    for entry in recorded or ():
        if entry["time_created_ns"] < since * 1e9:
            continue
        one = _collective(entry, ranks)
        before, last[one.group] = last.get(one.group), one
        of_group = begun[one.group]
        if one.peer is not None:
            points[one.group] += [one] * one.is_pending
        elif one.operation == "coalesced" and before and before.peer is not None:
            # The end of a batch of sends and receives: its number is that of the collective before.
            if not one.is_pending:
                points[one.group].clear()
        else:
            # What has parts has their number; a smaller one is of a new group of an old one's name.
            while of_group and of_group[-1].number >= one.number:
                of_group.pop()
            of_group.append(one)
    found: list[list[wire.Collective]] = []
    for of_group in filter(None, begun.values()):
        first = next((i for i, one in enumerate(of_group) if one.is_pending), len(of_group))
        around = of_group[max(0, first - _NUM_AROUND) : first + _NUM_AROUND]
        found.append(around if around[-1] is of_group[-1] else [*around, of_group[-1]])
    return tuple(chain(*found, *(several[:_NUM_AROUND] for several in points.values())))


def _collective(entry: dict[str, Any], ranks: dict[str, list[int]]) -> wire.Collective:
    backend, _, name = entry["profiling_name"].rpartition(":")
    name, peer = name.lstrip("_"), None
    group = entry["process_group"][0]
    of_group = tuple(ranks.get(group, ()))
    if found := _POINT_TO_POINT.fullmatch(name):
        peer = int(found[2])
        peer = of_group[peer] if of_group else peer
        name = f"{found[1]} {'from' if found[1] == 'recv' else 'to'} rank {peer}"
    frames = [
        wire.Frame(frame["filename"], frame["line"], frame["name"])
        for frame in takewhile(lambda one: one["filename"] != _CALLER, entry.get("frames", ()))
    ]
    return wire.Collective(
        group=f"{group} {backend}",
        ranks=of_group,
        peer=peer,
        number=entry["collective_seq_id"],
        operation=_PLAIN_NAMES.get(name, name),
        sizes=" ".join(map(str, entry["input_sizes"])),
        is_pending=not entry["retired"],
        frames=tuple(frames[:_MAX_FRAMES]),
    )
