"""What a rank prints goes to its file; a disk that is full costs the output, never the run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from notebook_accel.launch.worker.output import redirect

if TYPE_CHECKING:
    from pathlib import Path


def test_a_full_disk_is_told_once_and_no_print_raises(tmp_path: Path) -> None:
    told = tmp_path / "told"
    child = os.fork()
    if not child:
        code = 1
        try:
            redirect(os.open("/dev/full", os.O_WRONLY), on_full_disk=lambda: _note(told))
            for number in range(3):
                print("line", number)
            print("without an end", end="", flush=True)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert told.read_text() == "full\n"


def _note(path: Path) -> None:
    with path.open("a") as file:
        file.write("full\n")
