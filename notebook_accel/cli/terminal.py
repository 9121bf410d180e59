"""Prints the output of several ranks in one terminal: labelled lines, with progress bars below.

    files of ranks => torchrun (its option --tee) => RankOutput.write => lines, and bars below them

If the output is no terminal, or Rich is not installed, progress bars are not drawn: of each, only
its state at 100% is printed, as a line.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

from notebook_accel.launch.text.terminal_text import plain_text

# As torchrun fills it in, before each piece of text that it hands over.
LABEL = "[rank ${rank}] "
_LABELLED = re.compile(r"\[rank (\d+)\] ")
# What tqdm draws: "train:  45%|####5     | 45/100 [00:01<00:02, 30.1it/s]", "12it [00:01, ...]".
# It ends with the bracket, in which values that the program shows may have brackets, too.
_BAR = re.compile(r"(?:(\d+)%\|[^|]*\| *\S+/\S+ |^\D*\d+it )\[(?:[^\[\]]|\[[^\[\]]*\])*\]?")
_MAX_BARS = 16
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


class _RichDisplay:
    """Prints lines by Rich, and keeps the newest progress bar of each rank below them."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.bars: dict[int, str] = {}
        self._console = Console(file=stream, highlight=False)
        self.live = Live(
            console=self._console,
            get_renderable=self._draw,
            transient=True,
            refresh_per_second=8,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def line(self, rank: int, text: str) -> None:
        from rich.text import Text

        label = f"[rank {rank}] ", _COLOURS[rank % len(_COLOURS)]
        self._console.print(Text.assemble(label, Text.from_ansi(text)), soft_wrap=True)

    def _draw(self) -> Any:
        from rich.text import Text

        rows = sorted(self.bars.items())[:_MAX_BARS]
        lines = (f"rank {rank}  {text}" for rank, text in rows)
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


class RankOutput:
    """Replaces ``sys.stdout`` or ``sys.stderr`` while torchrun runs, and prints lines of ranks.

    torchrun's threads write pieces that begin with ``LABEL``: a line, or more of an open one.
    Text without it goes to ``stream``, and so do lines if there is no ``display``. Both objects
    share ``lock``, so that lines do not mix.
    """

    def __init__(self, stream: TextIO, display: _RichDisplay | None, lock: threading.Lock) -> None:
        self._stream = stream
        self._display = display
        self._lock = lock
        self._open: dict[int, str] = {}

    def write(self, text: str) -> int:
        with self._lock:
            label = _LABELLED.match(text)
            if label is None:  # of the launcher itself
                self._stream.write(text)
                return len(text)
            rank = int(label[1])
            whole = self._open.pop(rank, "") + text[label.end() :]
            if whole.endswith("\n"):
                self._print(rank, whole[:-1])
            else:
                self._open[rank] = whole
                self._show_bar(rank, whole)
        return len(text)

    def close_lines(self) -> None:
        """Called at the end of the run."""
        with self._lock:
            for rank, text in self._open.items():
                if text:
                    self._print(rank, text)
            self._open.clear()

    def _show_bar(self, rank: int, text: str) -> re.Match[str] | None:
        """Return where the bar stands in the line that it begins; None for no bar."""
        found = _BAR.search(text)
        if found and self._display is not None:
            self._display.bars[rank] = plain_text(text[: found.end()])
        return found

    def _print(self, rank: int, text: str) -> None:
        found = self._show_bar(rank, text)
        lines = [text]
        if found:
            # A bar that is overwritten is a line here, too: torchrun reads "\r" as the end of one.
            # What a program prints while the bar stands comes behind it.
            bar, behind = text[: found.end()], text[found.end() :].lstrip(" ")
            lines = [bar] * (found[1] == "100") + [behind] * bool(plain_text(behind).strip())
        for line in lines:
            # Torch labels tracebacks itself.
            said = line.removeprefix(f"[rank{rank}]: ")
            if said and self._display is not None:
                self._display.line(rank, said)
            elif said:
                self._stream.write(f"[rank {rank}] {said}\n")
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def ranks_in_terminal() -> Iterator[None]:
    """Inside the block, label the ranks' output, which torchrun writes to stdout and stderr."""
    lock, out, err = threading.Lock(), sys.stdout, sys.stderr
    display: _RichDisplay | None = None
    with contextlib.ExitStack() as undo:
        if out.isatty() and err.isatty():
            with contextlib.suppress(ImportError):
                display = _RichDisplay(out)
                undo.enter_context(display.live)
        shown = RankOutput(out, display, lock), RankOutput(err, display, lock)
        undo.enter_context(contextlib.redirect_stdout(shown[0]))
        undo.enter_context(contextlib.redirect_stderr(shown[1]))
        for each in shown:
            undo.callback(each.close_lines)
        yield
