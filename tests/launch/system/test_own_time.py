"""The time that a process has had, on real processes."""

from __future__ import annotations

import subprocess
import sys
import time

from notebook_accel.launch.agent.rank_process import OwnTime


def test_a_process_that_waits_has_all_the_time() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        earliest = time.monotonic()
        clock = OwnTime(process.pid)
        made = time.monotonic()
        process.communicate(b"\n")
        ended = time.monotonic()
        # Of a process that has ended as well: nothing keeps it from anything.
        seconds = clock.read()
    assert ended - made <= seconds <= time.monotonic() - earliest
