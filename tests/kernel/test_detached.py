"""Runs that outlive their kernel: launched detached, attached from another kernel, ended there."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.engines.processes import gone
from tests.kernel.notebooks import SLOW, open_notebook
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kernel.notebooks import Notebook

_FUNCTIONS = """
import time
from pathlib import Path
import notebook_accel
from notebook_accel import Accelerator, notebook_launcher

class Weights:
    def __init__(self, value):
        self.value = value

def train(folder):
    accelerator = Accelerator()
    rank = accelerator.process_index
    print(f"begun {rank}")
    accelerator.log({"loss": 0.5}, step=1)
    (folder / f"begun{rank}").touch()
    while not (folder / "go").exists() and not accelerator.should_stop:
        time.sleep(0.01)
    print(f"went on {rank}")
    return Weights(rank + 40), [rank] * 100_000
"""


@pytest.fixture
def later(notebook: Notebook) -> Iterator[Notebook]:
    """Another notebook of the same user."""
    with open_notebook() as other:
        other.run("import notebook_accel")
        yield other


def launched(notebook: Notebook, folder: Path) -> str:
    """A detached run of two ranks that are in the function; gives its id."""
    notebook.run(f"{_FUNCTIONS}folder = Path({str(folder)!r})")
    run_id = notebook.run(
        "run = notebook_launcher(train, (folder,), 2, block=False, detach=True, view='none')\n"
        "print(run.id)"
    ).split()[-1]
    begun = [folder / "begun0", folder / "begun1"]
    eventually(lambda: all(one.exists() for one in begun), within=SLOW, what="both ranks train")
    return run_id


def test_a_detached_run_survives_the_death_of_its_kernel(
    notebook: Notebook, later: Notebook, tmp_path: Path
) -> None:
    run_id = launched(notebook, tmp_path)
    kernel = notebook.pid
    os.kill(kernel, signal.SIGKILL)
    eventually(lambda: gone([kernel]), within=SLOW, what="the kernel is dead")
    assert "running" in later.run("print(notebook_accel.runs(everywhere=True))")
    later.run(f"run = notebook_accel.attach({run_id!r}, view='none')")
    assert later.run("print(run.status)").strip() == "running"
    (tmp_path / "go").touch()
    assert later.run("print([(one.value, len(rest)) for one, rest in run])").strip() == (
        "[(40, 100000), (41, 100000)]"
    )
    logs = later.run("print(run.logs())")
    for rank in (0, 1):
        assert f"begun {rank}" in logs
        assert f"went on {rank}" in logs
    assert later.run("print([row['value'] for row in run.metrics])").strip() == "[0.5]"
    notebook.expect(0, but=kernel, within=SLOW)
    assert not (tmp_path / "runs" / run_id / ".attach").exists()
