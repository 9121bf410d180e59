"""A rank's newest collectives, by torch's flight recorder: who waits for whom is read from them.

With NCCL and its kin a collective returns at once, and the rank then waits for its device below a
line of the user's that is no collective. The recorder has the line that began it.
"""

from __future__ import annotations

import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

from notebook_accel.launch import wire
from notebook_accel.private import of_torch

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


def newest(*, since: float) -> tuple[dict[str, list[int]], tuple[wire.Collective, ...]]:
    """Return the ranks of each process group, and its collectives around the first that is pending.

    Both are empty in a process without torch's process groups.

    Args:
        since: wall time, seconds; what began before belongs to groups that are gone.
    """
    if "torch.distributed.distributed_c10d" not in sys.modules:
        return {}, ()
    begun: dict[str, dict[int, wire.Collective]] = {}
    ranks = of_torch.ranks_of_groups()
    groups: dict[str, list[int]] = {}
    for entry in of_torch.recorded_collectives():
        if entry["is_p2p"] or entry["time_created_ns"] < since * 1e9:
            continue
        one = _collective(entry)
        of_group = begun.setdefault(one.group, {})
        if of_group and one.number < max(of_group):  # a new group of an old one's name
            of_group.clear()
        of_group[one.number] = one
        if entry["process_group"][0] in ranks:
            groups[one.group] = ranks[entry["process_group"][0]]
    return groups, tuple(
        one for of_group in begun.values() for one in _around([*of_group.values()])
    )


def _around(begun: list[wire.Collective]) -> list[wire.Collective]:
    first = next((i for i, one in enumerate(begun) if one.is_pending), len(begun))
    kept = begun[max(0, first - _NUM_AROUND) : first + _NUM_AROUND]
    return kept if kept[-1] is begun[-1] else [*kept, begun[-1]]


def _collective(entry: dict[str, Any]) -> wire.Collective:
    backend, _, name = entry["profiling_name"].rpartition(":")
    name = name.lstrip("_")
    frames = takewhile(lambda frame: frame["filename"] != _CALLER, entry.get("frames", ()))
    return wire.Collective(
        group=f"{entry['process_group'][0]} {backend}",
        number=entry["collective_seq_id"],
        operation=_PLAIN_NAMES.get(name, name),
        sizes=" ".join(map(str, entry["input_sizes"])),
        is_pending=not entry["retired"],
        frames=tuple((frame["filename"], frame["line"], frame["name"]) for frame in frames)[
            :_MAX_FRAMES
        ],
    )
