"""Find the first collective at which ranks differ, from what each rank says of its newest ones.

Ranks that agree give a number of a group to the same operation. A rank differs that has not come to
a number, gives it to another operation, or other sizes to one that all of them wait in. A send or
receive has no number: it waits for its counterpart on one other rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from notebook_accel import wire


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
