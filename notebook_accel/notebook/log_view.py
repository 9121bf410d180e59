"""The log of the live panel: the newest lines of ranks, cut into blocks with one widget each.

    state --> LogWindow.read --> blocks --> LogWindow.next_block --> one widget per block

A full block never changes again: selections and a reader who scrolled up stay. When lines come
faster than they can be sent, the newest block and older unsent ones take turns; an ellipsis marks
lines that were skipped.

The box lays its content out from the bottom up (``column-reverse``), so that a page follows the
newest line until the reader scrolls up. "newest" makes a new box, which starts at the bottom.
Widgets of old blocks are reused: CSS ``order`` puts each into its place, none is ever removed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import ipywidgets
from markupsafe import Markup, escape

from notebook_accel.launch.control.run_state import RankState, RunState
from notebook_accel.launch.text.terminal_text import plain_text
from notebook_accel.launch.view.plain import LineReader
from notebook_accel.notebook.widgets import PanelWidgets
from notebook_accel.render.markup import element, join, lines_to_markup, shorten

_Timed = tuple[int | None, str]

# ---- The lines: pure functions of the state.

# A block is one message at most, and a panel may send 20 KB at a time.
_BLOCK_LINES = 100
_BLOCK_BYTES = 12_000
# A page scrolls through 2,000 lines without a pause; the rank's file has all.
_MAX_BLOCKS = 21
_MAX_LINES = 2000
# Of a line that takes more the start is shown, without its colours. The last line of a block may
# go beyond the block's own bytes by as much.
_LINE_BYTES = 6_000
# The element around lines of one rank and second, and that around text in a colour.
_LABEL_BYTES = 115
_COLOUR_BYTES = 50


@dataclass
class LogBlock:
    """Lines as (rank, second, text); rank None is the window itself, second None unknown.

    ``num_bytes`` estimates its HTML in a message; ``follows_gap``: the page lacks the block
    before this one.
    """

    number: int
    lines: list[tuple[int | None, int | None, str]] = field(default_factory=list)
    num_bytes: int = 0
    is_sent: bool = True
    follows_gap: bool = False


class LogWindow:
    """The last 2,000 lines of some ranks as blocks, fewer of long ones, and which the page has.

    ``words`` are searched for regardless of case; "" for all lines.
    """

    def __init__(self, ranks: Sequence[int], words: str = "") -> None:
        self.ranks, self.words = tuple(ranks), words
        self._needle = words.casefold()
        self._readers = {rank: LineReader() for rank in ranks}
        self._blocks: deque[LogBlock] = deque([LogBlock(0)], maxlen=_MAX_BLOCKS)
        self._num_found = 0
        # The number of the block that was sent last.
        self._sent_last = -1
        # Lines without an end yet, by rank: shown below all others.
        self._open_lines: dict[int, _Timed] = {}

    def read(self, state: RunState) -> None:
        news = {
            number: reader.read(state.ranks[number]) for number, reader in self._readers.items()
        }
        # Of 128 ranks that print at once nobody could see more.
        limit = max(20, _MAX_LINES // max(1, sum(bool(new) for new, _ in news.values())))
        found: list[tuple[int, int | None, str]] = []
        for number, (new, num_dropped) in news.items():
            wanted = self._wanted(_with_times(new, state.ranks[number]))
            self._num_found += len(wanted)
            lines = wanted[-limit:]
            num_missing = num_dropped + len(wanted) - len(lines)
            if num_missing and not self._needle:
                text = f"… {num_missing:,} more of rank {number}: run.logs({number}) has all lines"
                self._append(None, None, text)
            found += [(number, *line) for line in lines]
        # By their seconds, as they came: a new window begins with what all ranks have printed.
        for each in sorted(found, key=lambda one: one[1] or 0):
            self._append(*each)
        newest: dict[int, _Timed] = {}
        for number in self._readers:
            rank = state.ranks[number]
            if rank.open_line:
                # The second at which it began.
                seconds = (second for at, second in reversed(rank.times) if at <= rank.num_lines)
                line = next(seconds, None), rank.tail[-1]
                if self._wanted([line]):
                    newest[number] = line
        if newest != self._open_lines:
            self._open_lines = newest
            self._blocks[-1].is_sent = False

    def _wanted(self, lines: list[_Timed]) -> list[_Timed]:
        if not self._needle:
            return lines
        return [each for each in lines if self._needle in plain_text(each[1]).casefold()]

    @property
    def num_found(self) -> int:
        """Lines so far that contain ``words``, including lines dropped since."""
        return self._num_found + len(self._open_lines)

    def next_block(self) -> LogBlock | None:
        """Return an unsent block, now sent, or None: the newest one and older ones take turns.

        Where lines keep coming, the newest one alone would take every message.
        """
        unsent = [index for index, block in enumerate(self._blocks) if not block.is_sent]
        if not unsent:
            return None
        has_had_its_turn = self._blocks[unsent[-1]].number == self._sent_last and len(unsent) > 1
        index = unsent[-2] if has_had_its_turn else unsent[-1]
        block = self._blocks[index]
        block.is_sent, self._sent_last = True, block.number
        block.follows_gap = index > 0 and not self._blocks[index - 1].is_sent
        if block is not self._blocks[-1] and self._blocks[index + 1].follows_gap:
            # The page has what comes before that one from now on.
            self._blocks[index + 1].is_sent = False
        return block

    def render(self, block: LogBlock) -> Markup:
        """The newest block ends with the unfinished lines of the ranks."""
        lines = list(block.lines)
        if block is self._blocks[-1]:
            lines += [(rank, second, text) for rank, (second, text) in self._open_lines.items()]
        groups = [element("div", "…", class_="na-gap")] if block.follows_gap else []
        for (rank, second), group in groupby(lines, key=itemgetter(0, 1)):
            text = lines_to_markup(_cut(line) for _, _, line in group)
            has_label = rank is not None and len(self._readers) > 1
            label = element("span", str(rank), class_="na-tag", title=f"rank {rank}")
            groups.append(
                element(
                    "div",
                    label if has_label else "",
                    text,
                    class_="na-lines" if rank is not None else "na-lines na-gap",
                    # Drawn by the style sheet, so that it is not copied with the text.
                    data_time=second and time.strftime("%H:%M:%S", time.localtime(second)),
                )
            )
        return join(groups)

    def _append(self, rank: int | None, second: int | None, line: str) -> None:
        block = self._blocks[-1]
        if len(block.lines) >= _BLOCK_LINES or block.num_bytes >= _BLOCK_BYTES:
            # The open lines move below the new block.
            block.is_sent = block.is_sent and not self._open_lines
            block = LogBlock(block.number + 1)
            self._blocks.append(block)
        if not block.lines or block.lines[-1][:2] != (rank, second):
            block.num_bytes += _LABEL_BYTES
        block.num_bytes += min(_markup_bytes(line), _LINE_BYTES)
        block.lines.append((rank, second, line))
        block.is_sent = False


def _with_times(lines: Sequence[str], rank: RankState) -> list[_Timed]:
    """Return finished lines as (wall-clock second, text) pairs; None where the time is unknown."""
    first = rank.num_lines - len(lines)
    seconds: list[int | None] = []
    for (start, second), (end, _) in pairwise([*rank.times, (rank.num_lines, 0)]):
        seconds += [second] * (end - max(start, first))
    # Of an older state no times are known.
    seconds[:0] = [None] * (len(lines) - len(seconds))
    return list(zip(seconds, lines, strict=True))


def _markup_bytes(line: str) -> int:
    return len(escape(line).encode(errors="replace")) + _COLOUR_BYTES * line.count("\x1b")


def _cut(line: str) -> str:
    """Return at most ``_LINE_BYTES``; a line that is cut loses its colours."""
    if len(line) * _COLOUR_BYTES <= _LINE_BYTES or _markup_bytes(line) <= _LINE_BYTES:
        return line
    return shorten(plain_text(line), _LINE_BYTES)


# ---- The widgets.

_ALL_RANKS = -1


class LogView:
    """The widgets of a panel's log; ``saved`` makes a link to the output of a rank, or all."""

    def __init__(
        self, state: RunState, widgets: PanelWidgets, *, saved: Callable[[int | None], Markup]
    ) -> None:
        self._window = LogWindow(range(state.world_size))
        self._follow_asked = threading.Event()
        self._saved = saved
        self._widgets = widgets
        self._blocks = widgets.make(ipywidgets.VBox, classes="na-blocks")
        self._scroll = self._make_scroll_box()
        options = [("all ranks", _ALL_RANKS)]
        options += [(f"rank {rank}", rank) for rank in range(state.world_size)]
        self._filter = widgets.field(
            ipywidgets.Dropdown,
            "Output of",
            "Whose output is shown",
            options=options,
            classes="na-filter na-rank-filter",
        )
        self._search = widgets.field(
            ipywidgets.Text,
            "Search the output",
            "Show only lines with these words, of the newest 2,000 of each rank",
            placeholder="search",
            classes="na-search",
        )
        about = "Go to the newest line and follow the output"
        classes = "na-small-button na-follow"
        follow = widgets.button("↓ newest", about, self._follow_asked.set, classes)
        about = "Give a link that saves the output of these ranks as a file"
        save = widgets.button("Save", about, self._on_save)
        self._link = widgets.make(ipywidgets.HTML, classes="na-link")
        self._title = widgets.make(ipywidgets.HTML, "output", classes="na-log-title na-optional")
        parts = [self._title, self._filter, self._search, self._link, save, follow]
        if state.world_size == 1:
            parts.remove(self._filter)
        self._bar = widgets.make(ipywidgets.HBox, parts, classes="na-log-bar")
        content = [self._bar, self._scroll]
        self.box = widgets.make(ipywidgets.VBox, content, classes="na-log")

    @property
    def chosen(self) -> int | None:
        return None if self._filter.value == _ALL_RANKS else self._filter.value

    def read(self, state: RunState) -> None:
        self._window.read(state)

    def draw(self, state: RunState) -> bool:
        """Apply clicks and send one block to the page; return True if more blocks may be unsent."""
        # A click may change what is chosen meanwhile.
        chosen, words = self.chosen, self._search.value.strip()
        ranks = tuple(range(state.world_size)) if chosen is None else (chosen,)
        if (self._window.ranks, self._window.words) != (ranks, words):
            self._window = LogWindow(ranks, words)
            self._window.read(state)
            for widget in self._blocks.children:
                widget.value = ""
            self._follow_asked.set()
        if self._follow_asked.is_set():
            self._follow_asked.clear()
            old, self._scroll = self._scroll, self._make_scroll_box()
            self.box.children = (self._bar, self._scroll)
            old.close()
        found = self._window.num_found
        hits = f"{found:,} hit{'' if found == 1 else 's'}" if found else "nothing found"
        self._title.value = hits if words else "output"
        # On a narrow page only a title that says something has room.
        (self._title.remove_class if words else self._title.add_class)("na-optional")
        block = self._window.next_block()
        if block is None:
            return False
        # Blocks stand in the page's own order too, for screen readers and for copied text, but
        # for the seam between the oldest and the newest one.
        index = block.number % _MAX_BLOCKS
        if index >= len(self._blocks.children):
            # All at once: each change of the box sends its whole list of widgets to the page.
            missing = range(len(self._blocks.children), index + 1)
            added = [self._widgets.make(ipywidgets.HTML) for _ in missing]
            self._blocks.children = [*self._blocks.children, *added]
        lines = self._window.render(block)
        # The order comes with the lines: as the widget's layout it would be one more message.
        markup = element("div", lines, class_="na-block", style=f"order:{block.number}")
        self._blocks.children[index].value = str(markup)
        return True

    def _on_save(self) -> None:
        self._link.value = str(self._saved(self.chosen))

    def _make_scroll_box(self) -> Any:
        return self._widgets.make(ipywidgets.Box, [self._blocks], classes="na-scroll")
