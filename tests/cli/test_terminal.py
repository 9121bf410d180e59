"""What several ranks print, as a person sees it."""

import contextlib
import io
import os
import pty
import sys
import threading

import pytest

from notebook_accel.cli.terminal import RankOutput, ranks_in_terminal

BARS = ("[rank 1] ep:  50%|##  | 1/2 [00:01<00:01, 1.0it/s]", "[rank 1] \n")
DONE = "[rank 1] ep: 100%|####| 2/2 [00:02<00:00, 1.0it/s]\n"


def tail(write):
    """What torchrun's tail writes: pieces of lines, each with its label."""
    for text in ("[rank 0] one\n", "[rank 1] be", *BARS, "[rank 0] [rank0]: Trace\n", DONE):
        write(text)
    write("a line of the launcher\n")
    write("[rank 0] without an end")


def test_plain_lines_have_whole_bars_alone(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with ranks_in_terminal():
        assert isinstance(sys.stdout, RankOutput)
        tail(sys.stdout.write)
    assert sys.stdout is out
    assert out.getvalue().splitlines() == [
        "[rank 0] one",
        "[rank 0] Trace",
        "[rank 1] ep: 100%|####| 2/2 [00:02<00:00, 1.0it/s]",
        "a line of the launcher",
        "[rank 0] without an end",
    ]


def test_what_is_printed_behind_a_standing_bar_is_a_line(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    bar = "ep:  50%|##  | 1/2 [00:01<00:01, 1.0it/s, at=[1, 2]]"
    with ranks_in_terminal():
        for behind in ("INFO step 3", "\x1b[A", "  one | 1/2 [x]"):
            sys.stdout.write(f"[rank 0] {bar}{behind}\n")
        sys.stdout.write(f"[rank 1] {bar}")
        sys.stdout.write("[rank 1]   [rank1]: Trace")
        sys.stdout.write("[rank 1] back\n")
        sys.stdout.write(f"[rank 1] {DONE.removeprefix('[rank 1] ').rstrip()}done\n")
        sys.stdout.write(f"[rank 1] {bar}the end")
    assert out.getvalue().splitlines() == [
        "[rank 0] INFO step 3",
        "[rank 0] one | 1/2 [x]",
        "[rank 1] Traceback",
        DONE.rstrip(),
        "[rank 1] done",
        "[rank 1] the end",
    ]


def test_a_terminal_shows_the_bar_of_each_rank(monkeypatch):
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    read, has_bar = bytearray(), threading.Event()

    def listen():
        with contextlib.suppress(OSError):
            while data := os.read(ours, 10_000):
                read.extend(data)
                if b"rank 1  ep: 100%" in read:
                    has_bar.set()

    listener = threading.Thread(target=listen)
    listener.start()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        with ranks_in_terminal():
            tail(sys.stdout.write)
            assert has_bar.wait(60)
        monkeypatch.undo()
    listener.join()
    os.close(ours)
    text = read.decode()
    assert "[rank 0] " in text
    assert "one" in text
    assert "without an end" in text
