"""The log of the live panel: one widget a block of lines, in a box that scrolls.

Nothing but core widgets and CSS. The box lays its content out from the bottom up
(``column-reverse``), so that a page shows the newest line, and goes on doing so, until somebody
scrolls up; then the browser keeps what he sees in place. A new box starts at the bottom again,
which is what the button does.

Widgets are used again for newer blocks: each block has its place in the box by its ``order`` in
CSS, so that no widget is ever taken out, and the page draws no other anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accel.notebook.log_window import LogWindow
from notebook_accel.notebook.markup import element

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_accel.launch.control.state import RunState
    from notebook_accel.notebook.clicks import ClicksAfterTheCell
    from notebook_accel.notebook.log_window import LogBlock
    from notebook_accel.notebook.markup import Markup
    from notebook_accel.notebook.panel_widgets import PanelWidgets

__all__ = ["LogView"]

# For 2,000 lines of 200 characters; where lines are longer than that, fewer of them are shown.
_MAX_WIDGETS = 40
_ALL_RANKS = -1


class LogView:
    """The log of one panel: which ranks it shows, and what its page has of them.

    Attributes:
        chosen: the rank whose output is shown; None for all.

    Args:
        state: the run's state.
        clicks: how clicks get through.
        widgets: makes those of the panel.
        saved: gives the whole log of a rank, or of all (None), as a link or a line of HTML.
    """

    def __init__(
        self,
        state: RunState,
        clicks: ClicksAfterTheCell,
        widgets: PanelWidgets,
        *,
        saved: Callable[[int | None], Markup],
    ) -> None:
        self._all_ranks = LogWindow(range(state.world_size))
        self._window = self._all_ranks
        self.chosen: int | None = None
        self._words = ""
        self._is_follow_asked = False
        self._is_save_asked = False
        self._saved = saved
        # The number of the block that each widget shows.
        self._shown: dict[int, int] = {}
        self._has_output = False
        self._is_turn_of_older = False
        self._widgets = widgets
        self._blocks = widgets.make(ipywidgets.VBox)
        self._blocks.add_class("na-blocks")
        self._scroll = self._make_scroll_box()
        options = [("all ranks", _ALL_RANKS)]
        options += [(f"rank {rank}", rank) for rank in range(state.world_size)]
        self._filter = widgets.make(
            ipywidgets.Dropdown,
            options=options,
            description="Output of",
            tooltip="Whose output is shown",
        )
        self._filter.add_class("na-filter")
        self._filter.add_class("na-rank-filter")
        self._filter.observe(self._on_choice, names="value")
        self._search = widgets.make(
            ipywidgets.Text,
            placeholder="search",
            description="Search the output",
            tooltip="Show only lines with these words, of the newest 2,000 of each rank",
        )
        self._search.add_class("na-search")
        self._search.observe(self._on_search, names="value")
        self._follow = widgets.make(
            ipywidgets.Button,
            description="↓ newest",
            tooltip="Go to the newest line and follow the output",
        )
        self._save = widgets.make(
            ipywidgets.Button,
            description="Save",
            tooltip="Give a link that saves the output of these ranks as a file",
        )
        for button, act in ((self._follow, self._on_follow), (self._save, self._on_save)):
            button.add_class("na-small-button")
            button.on_click(act)
        self._follow.add_class("na-follow")
        self._link = widgets.make(ipywidgets.HTML)
        self._link.add_class("na-link")
        self._title = widgets.make(ipywidgets.HTML, "output")
        self._title.add_class("na-log-title")
        self._title.add_class("na-optional")
        parts = [self._title, self._filter, self._search, self._link, self._save, self._follow]
        if state.world_size == 1:
            parts.remove(self._filter)
        for widget in (self._filter, self._search, self._follow, self._save):
            clicks.let_through(widget)
        self._bar = widgets.make(ipywidgets.HBox, parts)
        self._bar.add_class("na-log-bar")
        self.box = widgets.make(ipywidgets.VBox, [self._bar, self._scroll])
        self.box.add_class("na-log")
        self.box.add_class("na-hidden")

    def read(self, state: RunState) -> None:
        """Take what ranks printed since the last call."""
        self._all_ranks.read(state)
        if self._window is not self._all_ranks:
            self._window.read(state)

    def draw(self, state: RunState) -> bool:
        """Send the page one block that it lacks; True where more may wait."""
        ranks = tuple(range(state.world_size)) if self.chosen is None else (self.chosen,)
        if (self._window.ranks, self._window.words) != (ranks, self._words):
            is_all = self.chosen is None and not self._words
            self._switch_to(self._all_ranks if is_all else LogWindow(ranks, self._words), state)
        if self._is_save_asked:
            self._is_save_asked = False
            self._link.value = str(self._saved(self.chosen))
        if self._is_follow_asked:
            self._is_follow_asked = False
            old, self._scroll = self._scroll, self._make_scroll_box()
            self.box.children = (self._bar, self._scroll)
            old.close()
        self._say_what_was_found()
        if not self._has_output and not self._window.is_empty:
            self._has_output = True
            self.box.remove_class("na-hidden")
        return self._send_block()

    # ---- clicks: they only leave a note, since they may come from another thread ----

    def _on_choice(self, change: dict[str, Any]) -> None:
        self.chosen = None if change["new"] == _ALL_RANKS else change["new"]

    def _on_search(self, change: dict[str, Any]) -> None:
        self._words = change["new"].strip()

    def _on_save(self, _button: Any) -> None:
        self._is_save_asked = True

    def _on_follow(self, _button: Any) -> None:
        self._is_follow_asked = True

    # ---- drawing ----

    def _switch_to(self, window: LogWindow, state: RunState) -> None:
        self._window = window
        window.read(state)
        window.forget_sent()
        for index in list(self._shown):
            self._clear(index)
        self._is_follow_asked = True

    def _say_what_was_found(self) -> None:
        """Say how many lines the search has found, also why a box is empty."""
        found = self._window.num_found
        hits = f"{found:,} hit{'' if found == 1 else 's'}" if found else "nothing found"
        self._title.value = hits if self._words else "output"
        # On a narrow page only a title that says something has room.
        (self._title.remove_class if self._words else self._title.add_class)("na-optional")

    def _send_block(self) -> bool:
        numbers = self._window.block_numbers
        # The newest block and those before it take turns: where lines keep coming, the newest one
        # alone would take every message.
        self._is_turn_of_older = not self._is_turn_of_older
        while (block := self._window.next_block(older=self._is_turn_of_older)) is not None:
            # There may be more blocks than widgets, where lines are long: the newest are shown.
            if block.number >= numbers.stop - _MAX_WIDGETS:
                self._show(block)
                return True
        # Blocks that the window has dropped; in a flood their widgets are used again instead.
        for index, number in list(self._shown.items()):
            if number < numbers.start:
                self._clear(index)
        return False

    def _show(self, block: LogBlock) -> None:
        # Blocks stand in the page's own order too, for screen readers and for copied text, but
        # for the seam between the oldest and the newest one.
        index = block.number % _MAX_WIDGETS
        if index >= len(self._blocks.children):
            self._add_widgets(index + 1 - len(self._blocks.children))
        lines = self._window.render(block)
        # The order comes with the lines: as the widget's layout it would be one more message.
        markup = element("div", lines, class_="na-block", style=f"order:{block.number}")
        self._blocks.children[index].value = str(markup)
        self._shown[index] = block.number

    def _clear(self, index: int) -> None:
        self._blocks.children[index].value = ""
        del self._shown[index]

    def _add_widgets(self, number: int) -> None:
        """Add widgets to the box, all at once: each time the page is told the whole list."""
        added = [self._widgets.make(ipywidgets.HTML) for _ in range(number)]
        self._blocks.children = [*self._blocks.children, *added]

    def _make_scroll_box(self) -> Any:
        box = self._widgets.make(ipywidgets.Box, [self._blocks])
        box.add_class("na-scroll")
        return box
