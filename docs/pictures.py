"""Pictures of who holds what: a column a rank, a bar for each thing that a training has.

The filled part of a bar is what the rank holds. The colours are those of the page's theme, so that
one picture serves in light and in dark.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["STRATEGIES", "Holding", "draw"]

_Parts = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Holding:
    """What each rank holds.

    Attributes:
        title: said to those who cannot see the picture.
        rows: for each thing its name, and the parts of it that rank 0, 1, ... hold, from 0 to 1.
    """

    title: str
    rows: Sequence[tuple[str, Sequence[_Parts]]]


_WHOLE: list[_Parts] = [((0.0, 1.0),)] * 4
_DIVIDED: list[_Parts] = [((rank / 4, (rank + 1) / 4),) for rank in range(4)]
# Under a causal mask each rank gets a piece of the front and one of the back.
_FRONT_AND_BACK: list[_Parts] = [
    ((rank / 8, (rank + 1) / 8), (1 - (rank + 1) / 8, 1 - rank / 8)) for rank in range(4)
]


def _training(
    title: str,
    batch: list[_Parts],
    weights: list[_Parts],
    gradients: list[_Parts],
    states: list[_Parts],
) -> Holding:
    rows = [("batch", batch), ("weights", weights), ("gradients", gradients)]
    return Holding(title, [*rows, ("optimizer state", states)])


_D, _W = _DIVIDED, _WHOLE
STRATEGIES = {
    "ddp": _training("DDP: each rank holds everything but its part of the batch", _D, _W, _W, _W),
    "fsdp": _training("FSDP2: each rank holds a part of everything", _D, _D, _D, _D),
    "tensor": _training(
        "Tensor parallelism: all ranks read the whole batch; each holds a part of every layer",
        _W,
        _D,
        _D,
        _D,
    ),
    "pipeline": Holding(
        "Pipeline: each rank holds the layers of its stage",
        [("batch", _W), ("layers", _D), ("gradients", _D), ("optimizer state", _D)],
    ),
    "context": Holding(
        "Context parallelism: each rank holds two pieces of every sequence, and shards of weights",
        [
            ("samples", _W),
            ("each sequence", _FRONT_AND_BACK),
            ("weights", _D),
            ("gradients", _D),
            ("optimizer state", _D),
        ],
    ),
    "zero-1": _training("ZeRO 1: the optimizer's state is in parts", _D, _W, _W, _D),
    "zero-2": _training("ZeRO 2: gradients and the optimizer's state are in parts", _D, _W, _D, _D),
    "zero-3": _training("ZeRO 3: everything is in parts", _D, _D, _D, _D),
}

# Sizes in the picture's own units.
_NAME, _BAR, _GAP, _LINE, _HEAD, _HEIGHT = 106, 66, 10, 26, 24, 15


def draw(holding: Holding) -> str:
    """The picture as SVG, to stand within a page."""
    number = len(holding.rows[0][1])
    width, height = _NAME + number * (_BAR + _GAP), _HEAD + len(holding.rows) * _LINE
    return "".join(
        [
            f'<svg role="img" aria-label="{escape(holding.title)}"',
            f' viewBox="0 0 {width} {height}" style="max-width:{width}px">',
            *_heads(number),
            *_bars(holding),
            "</svg>",
        ]
    )


def _left(rank: int) -> int:
    return _NAME + rank * (_BAR + _GAP)


def _heads(number: int) -> Iterator[str]:
    for rank in range(number):
        yield f'<text class="head" x="{_left(rank)}" y="15">rank {rank}</text>'


def _bars(holding: Holding) -> Iterator[str]:
    for line, (name, of_ranks) in enumerate(holding.rows):
        top = _HEAD + line * _LINE
        yield f'<text x="0" y="{top + 13}">{escape(name)}</text>'
        for rank, parts in enumerate(of_ranks):
            left = _left(rank)
            yield f'<rect class="all" x="{left}" y="{top}" width="{_BAR}" height="{_HEIGHT}"/>'
            for begin, end in parts:
                yield (
                    f'<rect class="held" x="{left + begin * _BAR:g}" y="{top}" '
                    f'width="{(end - begin) * _BAR:g}" height="{_HEIGHT}"/>'
                )
