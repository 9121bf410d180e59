"""A little of the chaos, so that it keeps working; ``make test-chaos`` is all of it."""

import tempfile
from pathlib import Path

import pytest

from tests.chaos.__main__ import Chaos


@pytest.mark.serial
def test_a_few_deaths():
    # A short folder: sockets get their paths there.
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        chaos = Chaos(7, Path(folder), num_kernels=2)
        chaos.run(8)
    assert chaos.wrong == []
    assert sum(chaos.counts[victim] for victim in ("rank", "agent", "template", "kernel")) >= 4
