"""What a rank prints goes to its file; a disk that is full costs the output, never the run."""

import os
import resource
import subprocess
import sys

import pytest

from notebook_accel.launch.worker.streams import redirect


@pytest.mark.parametrize("log", ["/dev/full", "limited"])
def test_a_disk_that_takes_no_more_is_told_once_and_no_print_raises(log, tmp_path):
    told = tmp_path / "told"
    child = os.fork()
    if not child:
        code = 1
        try:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
            fd = os.open(tmp_path / log, os.O_WRONLY | os.O_CREAT)
            redirect(fd, on_lost=lambda _: _note(told))
            for number in range(3):
                print("line", number)
            print("without an end", end="", flush=True)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert told.read_text() == "lost\n"


PRINTS = r"""
import os, sys
from notebook_accel.launch.worker.streams import redirect

redirect(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), on_lost=print)
print("\u2713")
"""


def test_what_is_printed_is_utf_8_whatever_the_locale_is(tmp_path):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", PRINTS, str(tmp_path / "log")]
    subprocess.run(command, env={**os.environ, **locale}, timeout=60, check=True)
    assert (tmp_path / "log").read_bytes() == b"\xe2\x9c\x93\n"


def _note(path):
    with path.open("a") as file:
        file.write("lost\n")
