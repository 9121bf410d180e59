"""The limit of open files of the notebook's own process."""

from __future__ import annotations

import os
import subprocess
import sys

from notebook_accel.launch.system.open_files import check_open_files

_LEAKY = """
import os, resource
from notebook_accel import LaunchError, notebook_launcher
from notebook_accel.launch.control.metrics_file import MetricStore
from notebook_accel.launch.control.run_folder import RunFolder
folder = RunFolder.make()
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
try:
    while True:
        os.open("/dev/null", os.O_RDONLY)
except OSError:
    pass
makers = (
    lambda: notebook_launcher(lambda: 1, num_processes=1, view="none"),
    lambda: RunFolder.make(),
    lambda: folder.make_logs(1),
    lambda: MetricStore(folder.path),
)
for make in makers:
    try:
        make()
    except LaunchError as error:
        assert "too many files open: its limit is 100 (ulimit -n)" in str(error), error
    else:
        raise AssertionError("it was made")
print("told")
"""


def test_a_kernel_that_has_no_descriptor_left_names_the_limit() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _LEAKY], check=False, capture_output=True, text=True, timeout=120
    )
    assert run.stdout == "told\n", run.stderr


def test_the_check_leaves_nothing_open() -> None:
    before = os.listdir("/proc/self/fd")
    check_open_files(24)
    assert os.listdir("/proc/self/fd") == before
