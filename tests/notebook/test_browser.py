"""The live panel in a real JupyterLab, in a real browser, on several versions of ipykernel."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import nbclient
import nbformat
import pytest

from tests.notebook.kernels import INSTALLED, OTHERS
from tests.notebook.lab import Lab, Notebook, open_browser, open_lab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Locator

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

VERSIONS = (INSTALLED, *OTHERS)
SETUP = """
import ipykernel
from notebook_accel import notebook_launcher
print("ipykernel", ipykernel.__version__)
"""
# It trains until it is stopped; rank 1 draws no bar.
TRAIN = """
def train():
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from tqdm.auto import tqdm
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(2000, 8)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    for epoch in range(1000):
        for (x,) in tqdm(loader, desc="train", disable=not accelerator.is_main_process):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                accelerator.log({"loss": loss}, step=step)
            if step == 20:
                print(f"rank {accelerator.process_index} speaks <b>loudly</b>")
            if accelerator.should_stop:
                return step
"""
LAUNCH = "run = notebook_launcher(train, num_processes=2)"
AFTER = "print('left at', run[0] == run[1], run.status)"

# Where a line of the log stands on the page; the elements that hold lines are long.
_RANGE = """
  const range = document.createRange();
  const walker = document.createTreeWalker(document.querySelector('.na-blocks'), 4);
  let found = null;
  while (walker.nextNode()) {
    const at = walker.currentNode.data.lastIndexOf(words);
    if (at >= 0) found = [walker.currentNode, at];
  }
  if (!found) return null;
  range.setStart(found[0], found[1]);
  range.setEnd(found[0], found[1] + words.length);
"""
TOP_OF = f"(words) => {{ {_RANGE} return range.getBoundingClientRect().top }}"
SELECT = (
    f"(words) => {{ {_RANGE} getSelection().removeAllRanges(); getSelection().addRange(range) }}"
)
IN_SIGHT = f"""(words) => {{ {_RANGE}
  const line = range.getBoundingClientRect(), box = document.querySelector('.na-scroll')
    .getBoundingClientRect();
  return line.top >= box.top && line.bottom <= box.bottom + 1;
}}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab"), VERSIONS) as lab:
        yield lab


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with open_browser(chromium) as browser:
        yield browser


@pytest.fixture
def saved(tmp_path: Path) -> nbformat.NotebookNode:
    """A notebook whose run ended, as it is saved."""
    launch = """
def train():
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    for step in range(50):
        accelerator.log({"loss": 1 / (step + 1)}, step=step)
    print("a line of rank", accelerator.process_index)
run = notebook_launcher(train, num_processes=2, view="widgets")
"""
    cells = [nbformat.v4.new_code_cell(text) for text in (SETUP, launch)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=60, resources=resources).execute()
    return notebook


def values(output: Locator) -> list[float]:
    """How far the bars of the ranks are, in the order of their rows."""
    bars = output.locator("progress").all()
    return [float(bar.get_attribute("value") or 0) for bar in bars]


def wait_for_move(output: Locator, row: int, *, since: float) -> None:
    """Wait until a rank's bar shows something else."""
    bar = f"(since) => [...document.querySelectorAll('progress')][{row}]?.value !== since"
    output.page.wait_for_function(bar, arg=since, timeout=30_000)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_blocked_cell_shows_its_ranks_live_and_stops_by_mouse(
    lab: Lab, browser: Browser, version: str
) -> None:
    lab.write(f"{version}.ipynb", [SETUP, TRAIN, LAUNCH, AFTER], version)
    notebook = lab.open(browser, f"{version}.ipynb")
    notebook.wait_until_idle()
    notebook.run_all()
    output = notebook.output(2)
    output.locator("progress").nth(1).wait_for(timeout=60_000)
    if version != INSTALLED:
        assert f"ipykernel {version}" in notebook.output(0).inner_text()

    # Both bars move while the cell blocks, and each rank's lines are there, as text.
    for row in (0, 1):
        wait_for_move(output, row, since=values(output)[row])
    for rank in (0, 1):
        output.get_by_text(f"rank {rank} speaks <b>loudly</b>").wait_for(timeout=30_000)

    # The filter works meanwhile.
    output.get_by_label("Output of").select_option(label="rank 1")
    output.get_by_text("rank 0 speaks").wait_for(state="detached", timeout=30_000)
    output.get_by_text("rank 1 speaks").wait_for(timeout=30_000)

    assert "[*]" in notebook.prompt(2)
    output.get_by_role("button", name="Stop").click()
    notebook.output(3).get_by_text("left at True stopped").wait_for(timeout=60_000)

    # The panel has given way to the summary, and so it is saved.
    output.locator("img[alt^='loss']").wait_for(timeout=30_000)
    assert output.locator("button").count() == 0
    notebook.save()
    saved = json.loads((lab.folder / f"{version}.ipynb").read_text())
    (shown,) = saved["cells"][2]["outputs"]
    assert sorted(shown["data"]) == ["text/html", "text/plain"]
    notebook.close()


@pytest.mark.parametrize("version", [INSTALLED, OTHERS[0]])
def test_a_page_that_is_reloaded_while_a_cell_blocks_has_its_panel_and_stops_by_mouse(
    lab: Lab, browser: Browser, version: str
) -> None:
    name = f"reloaded-{version}.ipynb"
    lab.write(name, [SETUP, TRAIN, LAUNCH], version)
    notebook = lab.open(browser, name)
    notebook.wait_until_idle()
    notebook.run_all()
    notebook.output(2).locator("progress").nth(1).wait_for(timeout=60_000)
    notebook.save()
    notebook.page.reload()
    notebook = Notebook(notebook.page)
    output = notebook.output(2)
    output.locator("progress").nth(1).wait_for(timeout=60_000)
    wait_for_move(output, 0, since=values(output)[0])
    output.get_by_role("button", name="Stop").click()
    # The panel that is reloaded shows the summary in its own place.
    output.locator("img[alt^='loss']").wait_for(timeout=60_000)
    output.get_by_text("stopped").first.wait_for(timeout=30_000)
    notebook.wait_until_idle()
    notebook.close()


SPEAK = """
import pathlib, time
def speak(folder, lines):
    print("\\n".join(f"line {number}" for number in range(lines)), flush=True)
    for part in range(1, 100):
        while not (pathlib.Path(folder) / str(part)).exists():
            time.sleep(0.02)
        print(f"part {part}\\n" * 5, flush=True)
        if (pathlib.Path(folder) / "end").exists():
            return
"""
SCROLL = "document.querySelector('.na-scroll')"


def test_the_log_follows_until_somebody_scrolls_up_and_again_by_a_button(
    lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    launch = f"run = notebook_launcher(speak, ({str(tmp_path)!r}, 1900), num_processes=1)"
    lab.write("log.ipynb", [SETUP, SPEAK, launch], INSTALLED)
    notebook = lab.open(browser, "log.ipynb")
    page = notebook.page
    notebook.wait_until_idle()
    notebook.run_all()
    output = notebook.output(2)

    def add(part: int) -> None:
        (tmp_path / str(part)).touch()
        output.get_by_text(f"part {part}").first.wait_for(timeout=30_000)

    # All lines are reachable, and the newest one is in sight.
    output.get_by_text("line 1899").wait_for(timeout=60_000)
    page.wait_for_function(
        "() => document.querySelector('.na-blocks').innerText.split('\\n')"
        ".filter(line => line.startsWith('line ')).length === 1900",
        timeout=30_000,
    )
    text = page.evaluate("() => document.querySelector('.na-blocks').innerText")
    assert list(map(int, re.findall(r"line (\d+)", text))) == list(range(1900))
    add(1)
    assert page.evaluate(IN_SIGHT, "part 1")

    # A reader who scrolled up stays where he is, with what he selected.
    page.evaluate(f"() => {SCROLL}.scrollBy(0, -5000)")
    page.evaluate(SELECT, "line 1500")
    before = page.evaluate(TOP_OF, "line 1500")
    add(2)
    add(3)
    assert abs(page.evaluate(TOP_OF, "line 1500") - before) < 2
    assert page.evaluate("() => getSelection().toString()") == "line 1500"
    assert not page.evaluate(IN_SIGHT, "part 3")

    # The button follows again.
    output.get_by_role("button", name="newest").click()
    page.wait_for_function(IN_SIGHT, arg="part 3", timeout=30_000)
    add(4)
    page.wait_for_function(IN_SIGHT, arg="part 4", timeout=30_000)

    # The end leaves the last lines open.
    (tmp_path / "end").touch()
    add(5)
    output.get_by_text("succeeded").first.wait_for(timeout=30_000)
    assert output.get_by_text("part 5").first.is_visible()
    notebook.close()


def test_after_a_restart_in_mid_run_the_panel_looks_dead_and_says_what_to_type(
    lab: Lab, browser: Browser
) -> None:
    lab.write("dead.ipynb", [SETUP, TRAIN, LAUNCH.replace("2)", "2, block=False)")], INSTALLED)
    notebook = lab.open(browser, "dead.ipynb")
    notebook.wait_until_idle()
    notebook.run_all()
    output = notebook.output(2)
    output.get_by_text("rank 0 speaks").wait_for(timeout=60_000)
    session = "window.jupyterapp.shell.currentWidget.sessionContext.session"
    notebook.page.evaluate(f"async () => {{ await {session}.kernel.restart() }}")
    notebook.page.wait_for_function(
        "() => getComputedStyle(document.querySelector('.na-panel'), '::after').content"
        ".includes('runs(everywhere=True)')",
        timeout=30_000,
    )
    for what in ("button", "select", ".na-status", "td.na-c-state"):
        assert not output.locator(what).first.is_visible()
    notebook.close()


def test_a_saved_summary_shows_without_a_kernel_and_untrusted(
    lab: Lab, browser: Browser, saved: nbformat.NotebookNode
) -> None:
    saved.metadata["kernelspec"] = {"name": "gone", "display_name": "gone"}
    nbformat.write(saved, lab.folder / "elsewhere.ipynb")
    notebook = lab.open(browser, "elsewhere.ipynb")
    notebook.choose_no_kernel()
    assert not notebook.is_trusted()
    output = notebook.output(1)
    output.get_by_text("✓ succeeded").first.wait_for(timeout=30_000)
    assert output.locator("td").filter(has_text="succeeded").count() == 2
    image = output.locator("img[alt^='loss']")
    image.wait_for(timeout=30_000)
    assert image.evaluate("image => image.complete && image.naturalWidth") == 250
    output.get_by_text("a line of rank 0").wait_for(timeout=30_000)
    notebook.page.close()
