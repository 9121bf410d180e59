"""The IPython shell of a rank: it runs cells as a kernel does, and keeps what they show.

Its namespace is the rank's ``__main__``. What a cell displays goes to the notebook through the
rank's own ``display``; the value of a last expression is kept, and goes back with the answer.
"""

# IPython carries few types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import base64
import sys
import warnings
from typing import TYPE_CHECKING, Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell

from notebook_accel.launch.payload import cells
from notebook_accel.launch.worker import displays
from notebook_accel.notebook.worker.calls import ShownValue

if TYPE_CHECKING:
    from notebook_accel.launch.payload import CellSource

__all__ = ["RankShell", "make_shell"]

# As of what a rank displays: a page with more of it stands still.
_MAX_BYTES = 2_000_000


def make_shell() -> RankShell:
    """The shell of this process, around its ``__main__``."""
    main = sys.modules["__main__"]
    made: RankShell = RankShell.instance(user_module=main, user_ns=vars(main), colors="NoColor")
    return made


class _Compiler(CachingCompiler):
    """Gives code the file name that its cell has in the notebook.

    Attributes:
        filename: of the cell that runs.
    """

    filename = "<cell>"

    def cache(self, *_args: Any, **_options: Any) -> str:
        return self.filename


class _Hook(DisplayHook):
    """Keeps what it would print; ``shown`` is the newest value's data by MIME type."""

    shown: dict[str, Any] | None = None

    def write_output_prompt(self) -> None:
        return

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        self.shown = format_dict

    def finish_displayhook(self) -> None:
        self._is_active = False


class RankShell(InteractiveShell):
    """Runs the cells of a session in one rank."""

    displayhook_class: Any = _Hook

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.compile: Any = _Compiler()
        self._hook: Any = self.displayhook
        # It names ways out that end no rank.
        warnings.filterwarnings("ignore", message="To exit: use 'exit'")
        figures = self._formatter.formatters["image/png"]
        figures.for_type_by_name("matplotlib.figure", "Figure", displays.figure_png)
        displays.format_by(self.mime_bundle)

    def init_history(self) -> None:
        # The history on disk is the person's own, and the notebook writes it.
        self.history_manager: Any = HistoryManager(shell=self, parent=self, enabled=False)
        configurables: Any = self.configurables
        configurables.append(self.history_manager)

    @property
    def _formatter(self) -> Any:
        return self.display_formatter

    def run(self, text: str, source: CellSource, first_line: int) -> ShownValue | None:
        """Run a cell; gives the value of its last expression, None where it shows none.

        Args:
            text: of the cell.
            source: of what the page shows, which tracebacks quote.
            first_line: number of the text's first line there.

        Raises:
            BaseException: whatever the cell raises, with its traceback from the cell on.
        """
        cells.install_sources([source])
        self.compile.filename = source.filename
        self._hook.shown = None
        # The lines of the cell's own magic are there as comments, so that lines are numbered as on
        # the page. A magic for the whole cell must come first, whatever the numbers are then.
        head = "" if text.startswith("%%") else "#\n" * (first_line - 1)
        result = self.run_cell(head + text, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        __tracebackhide__ = True
        if error is not None:
            raise error
        _show_figures()
        return None if self._hook.shown is None else _shown(self._hook.shown)

    def mime_bundle(self, value: Any) -> dict[str, Any]:
        """``value`` as data by MIME type; nothing where it has displayed itself."""
        data: dict[str, Any] = self._formatter.format(value)[0]
        return data

    # An error is raised to the notebook, which shows it: nobody reads one that is printed here.

    def showtraceback(self, *_args: Any, **_options: Any) -> None:
        return

    def showsyntaxerror(self, *_args: Any, **_options: Any) -> None:
        return

    def showindentationerror(self) -> None:
        return

    def _format_exception_for_storage(self, *_args: Any, **_options: Any) -> dict[str, Any]:
        return {}

    def ask_exit(self) -> None:
        """``exit`` in a cell leaves the cell, as ``sys.exit()`` does."""
        raise SystemExit

    def enable_gui(self, gui: Any = None) -> None:
        """There is no event loop here for windows of a GUI."""
        return


def _show_figures() -> None:
    """Show the figures that the cell has drawn and not shown, as a notebook does."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None and pyplot.get_fignums():
        pyplot.show()


def _shown(data: dict[str, Any]) -> ShownValue:
    texts = {
        mime: base64.b64encode(part).decode() if isinstance(part, bytes) else part
        for mime, part in data.items()
        if isinstance(part, (str, bytes))
    }
    text = texts.get("text/plain", "")
    size = sum(map(len, texts.values()))
    if size > _MAX_BYTES:
        short = text[:20_000]
        note = f"… (not shown: {size / 1e6:.1f} MB, the limit is {_MAX_BYTES / 1e6:.0f} MB)"
        texts = {"text/plain": f"{short}{note}"}
    return ShownValue(texts)
