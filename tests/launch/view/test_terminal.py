from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import sys
import termios
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from notebook_accel.launch import wire
from notebook_accel.launch.view.terminal import TerminalView
from notebook_accel.notebook.views import choose_view
from tests.notebook.states import after, running, succeeded

if TYPE_CHECKING:
    import pytest


def test_bars_move_in_their_place_and_lines_stand_above_them() -> None:
    stream = io.StringIO()
    view = TerminalView(stream)
    run: Any = SimpleNamespace(state=running(2), log_dir="")
    view.open(run)
    bars = [
        wire.Bar(rank=rank, bar=number, name=name, n=1, total=4, rate=2.0)
        for rank in (0, 1)
        for number, name in ((1, "epochs"), (2, "train"))
    ]
    state = after(running(2), *bars, wire.Output(rank=1, text="a line\n"))
    run.state = state
    view.poll()
    view.print_progress(state)
    text = stream.getvalue()
    assert "[rank 1] a line\n" in text
    for rank in (0, 1):
        assert re.search(rf"\rrank {rank}  epochs > train \|.*\| 1/4  1/4  2.00 it/s", text)
    run.state = succeeded(state)
    view.print_end()
    assert "train: succeeded, 2 ranks" in stream.getvalue().rpartition("\r")[2]
    assert "|" not in stream.getvalue().rpartition("\r")[2]


def test_a_rank_that_says_nothing_has_no_bar() -> None:
    stream = io.StringIO()
    view = TerminalView(stream)
    view.open(SimpleNamespace(state=running(1), log_dir=""))  # type: ignore[arg-type]
    view.print_progress(running(1))
    assert stream.getvalue() == ""


def test_plain_python_in_a_terminal_gets_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        view = choose_view("auto")
        assert type(view) is TerminalView
        bar = wire.Bar(rank=0, bar=1, name="train", n=1, total=4, rate=2.0)
        run: Any = SimpleNamespace(state=running(1), log_dir="")
        view.open(run)
        for number in (1, 2):
            bar = msgspec.structs.replace(bar, n=number)
            view.print_progress(after(running(1), bar))
        # A terminal hands on what was written piece by piece.
        drawn = b""
        while b"2/4" not in drawn and select.select([screen], [], [], 10)[0]:
            drawn += screen.read(4000)
        run.state = succeeded(run.state)
        view.print_end()
    shown = drawn.decode()
    assert re.search(r"^\rrank 0  train \|.*\| 1/4 .*\rrank 0  train \|.*\| 2/4 ", shown)
    assert "\n" not in shown
