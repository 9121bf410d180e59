"""A rank's child that became another user (sudo, su), and cannot be ended, holds nothing up."""

import os
import signal
import subprocess
import sys
from uuid import uuid4

import pytest

from tests.engines.processes import marked
from tests.templates import IMPORT_LITTLE
from tests.waiting import eventually

SOON = 90.0

# Root may signal whom it wants by this, and look into all processes by the other.
_CAP_KILL, _CAP_SYS_PTRACE, _PR_CAPBSET_DROP = 5, 19, 24

# A kernel without those: a child that becomes another user is as far out of its reach as a child
# that becomes root is for a person.
_KERNEL = f"""
import ctypes, os, sys
if len(sys.argv) == 1:
    for capability in ({_CAP_KILL}, {_CAP_SYS_PTRACE}):
        assert ctypes.CDLL(None).prctl({_PR_CAPBSET_DROP}, capability, 0, 0, 0) == 0
    os.execv(sys.executable, [sys.executable, "-c", os.environ["SCRIPT"], "again"])
"""
_KERNEL += IMPORT_LITTLE
_KERNEL += """
import os, pathlib, signal, subprocess, time
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import WorkerError
from notebook_accel.launch.launcher import launch
from notebook_accel.launch.launch_request import LaunchRequest

def train(how):
    child = subprocess.Popen(["sleep", "601"], user=65534)
    print("child", child.pid, flush=True)
    if how == "killed":
        # The first that dies ends the other one, which must have its child by then.
        folder = pathlib.Path(os.environ["NOTEBOOK_ACCEL_RUNS"])
        (folder / f"killed-{os.environ['RANK']}").touch()
        while len([*folder.glob("killed-*")]) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stays":
        time.sleep(600)
    return 5

config = LaunchConfig(num_processes=2, devices="cpu", grace=0.3)
for how in ("returns", "killed", "stays"):
    began = time.monotonic()
    run = launch(LaunchRequest(function=train, args=(how,), config=config, block=False))
    if how == "stays":
        while not all("child" in run.logs(rank) for rank in range(2)):
            time.sleep(0.05)
        run.kill()
    try:
        ended = run.wait(60).results
    except Exception as error:
        ended = type(error).__name__
    print("END", how, ended, flush=True)
    print(run.logs(), flush=True)
print("END")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="a child that changes its user needs root")
@pytest.mark.timeout(4 * SOON)
def test_a_child_that_changed_its_user_holds_up_no_run(tmp_path):
    mark = uuid4().hex
    environment = {
        **os.environ,
        "MARK": mark,
        "SCRIPT": _KERNEL,
        "NOTEBOOK_ACCEL_RUNS": str(tmp_path),
    }
    kernel = subprocess.Popen(
        [sys.executable, "-c", _KERNEL],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = kernel.communicate(timeout=2 * SOON)
    finally:
        kernel.kill()
        # They really were out of reach, and nothing else is left.
        eventually(lambda: len(marked("MARK", mark)) <= 6, what="ours are gone")
        left = [process.pid for process in marked("MARK", mark)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    ends = [line for line in out.splitlines() if line.startswith("END")]
    expected = ["returns [5, 5]", "killed WorkerError", "stays RunStopped"]
    assert ends == [*(f"END {end}" for end in expected), "END"], err
    assert len(left) == 6
