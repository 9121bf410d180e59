"""Ending descendants: many, kept ones, and those that cannot be ended."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from notebook_accel.system.processes import adopt_orphans, kill_descendants, python_code
from tests.interpreters import run_script


def fork(act=lambda: time.sleep(600)):
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            act()
        os._exit(0)
    return pid


def in_child(act):
    """Whether ``act`` gave True in a process of its own, within 30 seconds."""

    def run():
        signal.alarm(30)
        adopt_orphans()
        os._exit(0 if act() else 1)

    _, status = os.waitpid(fork(run), 0)
    return status == 0


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


def test_kept_children_keep_what_is_below_them():
    def with_a_child():
        fork()
        time.sleep(600)

    def act():
        kept, other = fork(with_a_child), fork(with_a_child)
        me = psutil.Process()
        while len(me.children(recursive=True)) < 4:
            time.sleep(0.01)
        below = [child.pid for child in psutil.Process(kept).children()]
        reaped = kill_descendants(keep=[kept])
        left = sorted(child.pid for child in me.children(recursive=True))
        kill_descendants()
        # The orphan of the other one became ours when its parent died.
        return len(reaped) == 2 and other in reaped and left == sorted([kept, *below])

    assert in_child(act)


def test_a_path_among_the_folders_of_modules_is_passed_over(monkeypatch):
    """Its text would be no Python in the process that is started with it."""
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/elsewhere"), "/here"])
    *_, code = python_code("pass")
    assert "'/here'" in code
    assert "elsewhere" not in code
