"""A rank's child that became another user (sudo, su), and cannot be ended, holds nothing up."""

import os

import pytest

from tests.interpreters import run_script

_SCRIPT = """
import os, subprocess
from notebook_accel.system.processes import kill_descendants, lives

# It reads from this process, and so ends with it.
theirs = subprocess.Popen(["cat"], user=65534, stdin=subprocess.PIPE)
os.setuid(65533)
ours = subprocess.Popen(["sleep", "600"])
assert kill_descendants() == [ours.pid]
assert lives(theirs.pid)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="a child that changes its user needs root")
def test_a_child_that_changed_its_user_is_left_alone_and_the_others_are_ended():
    run_script(_SCRIPT, timeout=30)
