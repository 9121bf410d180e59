"""The file of a rank's output: whoever writes to it adds to it, and its owner alone reads it."""

from __future__ import annotations

import os
from pathlib import Path

from notebook_accel.system.own_files import log_path, open_log


def test_writers_never_overwrite_each_other(tmp_path: Path) -> None:
    first, second = open_log(tmp_path, 3), open_log(tmp_path, 3)
    try:
        for fd, text in ((first, b"one\n"), (second, b"two\n"), (first, b"three\n")):
            os.write(fd, text)
    finally:
        os.close(first)
        os.close(second)
    path = log_path(tmp_path, 3)
    assert path.read_bytes() == b"one\ntwo\nthree\n"
    assert path.stat().st_mode & 0o077 == 0
