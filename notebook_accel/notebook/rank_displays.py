"""What ranks display (figures, HTML and the like), as outputs of a cell.

    the cell waits for the run   each display is an output of its own     RankDisplays
    run.show()                   the same, in the cell that calls it      RankDisplays
    run.show(rank)               the same, with displays of that rank     OnDemand
    the cell does not wait       HTML in the panel, then in the summary   render/snapshot.py
    a cell's last expression     the value of each rank, equal ones once  show_values

Ranks mostly display the same. So only the displays of the first rank that runs the call are shown;
``run.show(rank)`` shows those of another rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

from notebook_accel.launch.control.run_state import Display, RankState, RunState
from notebook_accel.launch.run import Run
from notebook_accel.launch.text import wording
from notebook_accel.launch.view import View
from notebook_accel.notebook.comparison import Charts, snapshot_of
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.render.markup import element
from notebook_accel.render.panel import AskedStacks
from notebook_accel.render.snapshot import LABEL_STYLE, first_asked

T = TypeVar("T")
# What is sent again each time that some of it changed: so many characters a second, since a Jupyter
# server drops messages beyond 1 MB a second, and at most once a second.
_PER_SECOND = 300_000
_REPLACE_SECONDS = 1.0


class RankDisplays:
    """Shows the displays of one rank (``first_asked``) as outputs of a cell, each display once.

    All MIME types are kept. An update replaces a display in its place; what comes after
    ``clear_output`` takes the places of what was cleared, since no output can be removed.
    """

    def __init__(self) -> None:
        self._num_shown = 0
        # By number, the slots of each display, and its data if the rank may replace it.
        self._shown: dict[int, tuple[list[DisplaySlot], Mapping[str, str] | None]] = {}
        # The slots of displays that were cleared.
        self._empty: list[list[DisplaySlot]] = []
        self._replace_due = 0.0

    def show_new(self, state: RunState) -> None:
        """Only the running cell's thread may call this."""
        rank, size = first_asked(state), 0
        is_due = state.has_ended or time.monotonic() >= self._replace_due
        cleared = [number for number in self._shown if number < rank.num_cleared]
        if cleared and not is_due:
            return
        emptied = [self._shown.pop(number)[0] for number in cleared]
        self._empty = [*emptied, *self._empty]
        for display in rank.displays:
            slots, data = self._shown.get(display.number, (None, None))
            if display.number >= self._num_shown:
                slots = self._empty.pop(0) if self._empty else None
            elif not is_due or data is None or data is display.data:
                continue
            size += sum(map(len, display.data.values())) if slots else 0
            slots = _show(display, state, rank, slots)
            self._shown[display.number] = slots, display.data if display.display_id else None
        self._num_shown = rank.num_displays
        for slots in emptied:
            for slot in slots if slots in self._empty else ():
                slot.clear()
        if size:
            self._replace_due = time.monotonic() + seconds_to_wait(size)


def seconds_to_wait(size: int) -> float:
    """Return the seconds between updates: a Jupyter server drops what is too much in a second."""
    return max(_REPLACE_SECONDS, size / _PER_SECOND)


class OnDemand(View):
    """Shows nothing until ``run.show()`` asks for it, then how the run stands at that moment."""

    asked_stacks: AskedStacks | None = None

    def reopen(self, run: Run) -> None:
        state = run.state
        summary = snapshot_of(run, state, now=state.now(), asked_stacks=self.asked_stacks)
        DisplaySlot().show(summary)
        RankDisplays().show_new(state)

    def show_displays(self, run: Run, rank: int) -> None:
        found = run.state.ranks[rank]
        for display in found.displays:
            _show(display, run.state, found)
        if not found.displays:
            say(f"rank {rank} displayed nothing")

    def charts_of(self, run: Run, names: Sequence[str]) -> Charts:
        return Charts({run.name: run}, names, of="this run")


def _show(
    display: Display, state: RunState, rank: RankState, slots: list[DisplaySlot] | None = None
) -> list[DisplaySlot]:
    """Show a display below its rank's label in new slots or those given; return the slots."""
    labels = [f"rank {rank.rank}"] if state.world_size > 1 else []
    slots = slots or [DisplaySlot() for _ in (*labels, display)]
    for slot, text in zip(slots, labels, strict=False):
        say(text, slot)
    slots[-1].show(display.data)
    # A long run displays more than a kernel should keep: pages go on to show it.
    slots[-1].bundle = {}
    return slots


def say(text: str, slot: DisplaySlot | None = None) -> None:
    """Show a line in grey, in a slot or the running cell's output."""
    html = element("span", text, style=LABEL_STYLE)
    (slot or DisplaySlot()).show({"text/html": str(html), "text/plain": text})


_PLAIN = "text/plain"


def show_values(
    values: Sequence[Mapping[str, str] | None], slot: DisplaySlot | None = None
) -> None:
    """Show each rank's value, equal ones once; without a slot, in the running cell's thread."""
    texts = by_rank([None if value is None else value.get(_PLAIN, "") for value in values])
    groups = _alike(values)
    is_rich = any({*value} != {_PLAIN} for value, _ in groups)
    if slot is not None:
        # Of a cell that has ended long ago nothing but a slot can be filled, with one thing.
        is_of_all = [len(ranks) for _, ranks in groups] == [len(values)]
        if groups:
            slot.show(groups[0][0] if is_of_all else {_PLAIN: texts})
        return
    for value, ranks in groups if is_rich else ():
        if len(values) > 1:
            say(wording.rank_list(ranks))
        DisplaySlot().show(value)
    if not is_rich:
        print(texts, end="")  # noqa: T201


def by_rank(texts: Sequence[str | None]) -> str:
    """Return the texts with labels, equal ones once, as in ``ranks 0-1: 3``; None has no text."""
    lines: list[str] = []
    for text, ranks in _alike(texts):
        # A text of several lines starts below its label, so that its columns stay aligned.
        separator = "\n" if "\n" in text else " "
        lines.append(f"{wording.rank_list(ranks)}:{separator}{text}\n")
    return "".join(lines)


def _alike(values: Sequence[T | None]) -> list[tuple[T, list[int]]]:
    """Return each different value with its ranks, by their first; None has no value."""
    found: list[tuple[T, list[int]]] = []
    for rank, value in enumerate(values):
        same = [ranks for other, ranks in found if other == value]
        if same:
            same[0].append(rank)
        elif value is not None:
            found.append((value, [rank]))
    return found
