"""A rank that has returned ends soon, whatever processes it has started."""

from __future__ import annotations

import atexit
import subprocess
import sys
import time

from notebook_accel.config import LaunchConfig
from notebook_accel.launch.view import View
from tests.launches import launch

_PROGRAM = """
import time
from multiprocessing.shared_memory import SharedMemory
import psutil
from notebook_accel.launch.worker import exiting

SharedMemory(create=True, size=1).unlink()
(tracker,) = psutil.Process().children()
began = time.monotonic()
exiting.finish(0, print)
print(time.monotonic() - began)
tracker.wait(60)
"""


def test_the_tracker_of_shared_memory_is_not_waited_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.7, "a second is what children get that have to be asked"


def test_work_of_atexit_that_is_cut_is_told() -> None:
    def train() -> int:
        atexit.register(time.sleep, 600)
        return 5

    config = LaunchConfig(num_processes=1, devices="cpu")
    run = launch(train, config=config, view=View())
    assert run[0] == 5
    assert [line for line in run.state.notices if "atexit" in line and "was cut" in line]
