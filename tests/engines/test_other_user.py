"""A rank's child that became another user (sudo, su), and cannot be ended, holds nothing up."""

import os
import subprocess

import pytest

from notebook_accel.system.processes import kill_descendants
from tests.engines.processes import gone
from tests.system.test_processes import fork, in_child

NOBODY = 65534


@pytest.mark.skipif(os.getuid() != 0, reason="a child that changes its user needs root")
def test_a_child_that_changed_its_user_is_left_alone_and_the_others_are_ended():
    def act():
        # It reads from this process, and so ends with it.
        theirs = subprocess.Popen(["cat"], user=NOBODY, stdin=subprocess.PIPE)
        os.setuid(NOBODY - 1)
        ours = fork()
        return kill_descendants() == [ours] and not gone([theirs.pid])

    assert in_child(act)
