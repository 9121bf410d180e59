"""The limit of open files of the notebook's own process."""

from tests.interpreters import run_script

_LEAKY = """
import os, resource
from dataclasses import replace
from notebook_accel import LaunchError, notebook_launcher
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.control.metrics_file import MetricStore
from notebook_accel.launch.control.run_folder import RunFolder
from notebook_accel.launch.launcher import Session
from notebook_accel.launch.launch_request import LaunchRequest
folder = RunFolder.make()
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

def fill(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        while True:
            os.open("/dev/null", os.O_RDONLY)
    except OSError:
        pass

def launch():
    return notebook_launcher(lambda: os.getpid(), num_processes=1, view="none")

# The soft limit is ours to raise.
fill(60, hard)
assert launch()[0]
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65_536)
request = LaunchRequest(config=LaunchConfig(num_processes=1, devices="cpu"))
session = Session(request)
assert session.call(replace(session.request, function=lambda: 5)).results == [5]
fill(100, 100)
makers = (
    launch,
    lambda: Session(request),
    lambda: session.call(replace(session.request, function=lambda: 1)),
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


def test_a_kernel_that_has_no_descriptor_left_names_the_limit():
    assert run_script(_LEAKY) == "told\n"
