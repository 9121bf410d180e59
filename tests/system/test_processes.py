"""Ending descendants, many at once, and starting Python."""

import sys
from pathlib import Path

from notebook_accel.system.processes import python_code
from tests.interpreters import run_script

ZOMBIES = """
import os, time
from notebook_accel.system.processes import adopt_orphans, kill_descendants, python_code

adopt_orphans()
pids = {os.fork() or os._exit(0) for _ in range(300)}
for pid in pids:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
begin = time.process_time()
assert set(kill_descendants()) == pids
assert time.process_time() - begin < 1.0
"""


def test_three_hundred_zombies_are_cleared_at_once():
    # A small process: each fork of one that has run tests for minutes copies its large page table.
    run_script(ZOMBIES)


def test_a_path_among_the_folders_of_modules_is_passed_over(monkeypatch):
    """Its text would be no Python in the process that is started with it."""
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/elsewhere"), "/here"])
    *_, code = python_code("pass")
    assert "'/here'" in code
    assert "elsewhere" not in code
