"""The picker in a real JupyterLab: a training is set up and launched by mouse and keyboard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.notebook.kernels import INSTALLED
from tests.notebook.lab import open_browser, open_lab

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

FORM = """
%load_ext notebook_accel
import pathlib, time
from IPython.display import HTML, display
from notebook_accel import config_picker
def train(rate, epochs=1):
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    display(HTML(f"<b>drawn by rank {accelerator.process_index}</b>"))
    while not pathlib.Path("seen").exists():
        time.sleep(0.02)
    return accelerator.num_processes, accelerator.gradient_accumulation_steps, rate, epochs
picker = config_picker({"num_processes": 1})
picker
"""


def test_a_training_is_picked_and_launched_by_mouse(tmp_path: Path, chromium: str) -> None:
    with open_lab(tmp_path, [INSTALLED]) as lab, open_browser(chromium) as browser:
        lab.write(
            "pick.ipynb", [FORM, "print(picker.config.num_processes, list(picker.run))"], INSTALLED
        )
        notebook = lab.open(browser, "pick.ipynb")
        notebook.wait_until_idle()
        notebook.run(0)
        form = notebook.output(0)
        form.get_by_text("No accelerator").or_(form.get_by_label("Devices")).first.wait_for(
            timeout=60_000
        )
        # A bad value is told while it is typed, and there is nothing to launch then.
        form.get_by_label("Processes", exact=True).fill("zero")
        form.get_by_text("expected a whole number").wait_for(timeout=60_000)
        assert form.get_by_role("button", name="Launch").is_disabled()
        form.get_by_label("Processes", exact=True).fill("2")
        form.get_by_label("Accumulation", exact=True).fill("4")
        form.get_by_text("gradient_accumulation_steps=4").wait_for(timeout=60_000)
        form.get_by_label("Function", exact=True).select_option(label="train")
        form.get_by_label("Arguments", exact=True).fill("0.5, epochs=3")
        form.get_by_role("button", name="Launch").click()
        # What rank 0 displays is there while it trains, and in the end.
        drawn = form.get_by_text("drawn by rank 0")
        drawn.wait_for(timeout=60_000)
        (lab.folder / "seen").touch()
        form.get_by_text("succeeded").first.wait_for(timeout=60_000)
        drawn.wait_for(timeout=60_000)
        assert form.get_by_text("drawn by rank 1").count() == 0
        notebook.run(1)
        said = "2 [(2, 4, 0.5, 3), (2, 4, 0.5, 3)]"
        notebook.output(1).get_by_text(said).wait_for(timeout=60_000)
        notebook.close()
