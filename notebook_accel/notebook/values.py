"""The values of a cell's last expression, one a rank, in the notebook: equal ones once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel.launch.text import wording
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.markup import element

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accel.notebook.worker.calls import ShownValue

__all__ = ["by_rank", "show_values"]

_PLAIN = "text/plain"


def show_values(values: Sequence[ShownValue | None], slot: DisplaySlot | None = None) -> None:
    """Show what each rank gave, below a label with its ranks; nothing where none gave anything.

    Args:
        values: of each rank; None for a rank without one.
        slot: where they go, as text and HTML in one; None for the output of the cell that runs.
    """
    texts = [None if value is None else value.text for value in values]
    is_rich = any(value is not None and set(value.data) != {_PLAIN} for value in values)
    if slot is not None:
        _show_in_slot(values, slot)
    elif is_rich:
        _show_rich(values)
    else:
        print(by_rank(texts), end="")  # noqa: T201


def by_rank(texts: Sequence[str | None]) -> str:
    """What each rank shows, with a label, equal texts once: ``ranks 0-1: 3``."""
    lines: list[str] = []
    for text, ranks in _alike(texts):
        # A text of several lines starts below its label, so that its columns stay aligned.
        separator = "\n" if "\n" in text else " "
        lines.append(f"{wording.rank_list(ranks)}:{separator}{text}\n")
    return "".join(lines)


def _alike(texts: Sequence[str | None]) -> list[tuple[str, list[int]]]:
    """Each text with the ranks that have it, in the order of the first of them."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks.setdefault(text, []).append(rank)
    return list(ranks.items())


def _groups(values: Sequence[ShownValue | None]) -> list[tuple[ShownValue, list[int]]]:
    found: list[tuple[ShownValue, list[int]]] = []
    for rank, value in enumerate(values):
        if value is None:
            continue
        same = [ranks for other, ranks in found if other.data == value.data]
        if same:
            same[0].append(rank)
        else:
            found.append((value, [rank]))
    return found


def _show_rich(values: Sequence[ShownValue | None]) -> None:
    for value, ranks in _groups(values):
        if len(values) > 1:
            label = wording.rank_list(ranks)
            html = element("span", label, style="opacity:.65;font-size:13px;padding:0 7px")
            DisplaySlot().show({"text/html": str(html), _PLAIN: label})
        DisplaySlot().show(value.data)


def _show_in_slot(values: Sequence[ShownValue | None], slot: DisplaySlot) -> None:
    """Of a cell that has ended long ago nothing but a slot can be filled, with one thing."""
    groups = _groups(values)
    if len(groups) == 1 and groups[0][1] == list(range(len(values))):
        slot.show(groups[0][0].data)
    elif groups:
        slot.show({_PLAIN: by_rank([None if value is None else value.text for value in values])})
