"""Everything on the live panel by mouse, in JupyterLab and in Notebook 7."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.notebook.kernels import INSTALLED
from tests.notebook.lab import Lab, open_browser, open_lab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Locator

    from tests.notebook.lab import Notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

APPS = ("lab", "notebook")
SETUP = "from notebook_accel import notebook_launcher"
# What would do harm, or look wrong, in a page that took it as it comes.
SPEAK = r"""
def speak(folder):
    import os, pathlib, time
    from tqdm import tqdm
    from notebook_accel import Accelerator
    from notebook_accel.launch.rank import current
    accelerator = Accelerator()
    os.write(1, b"x" * 1_000_000)
    os.write(1, b"\nafter the long line\n")
    # More than a view shows at once stays in the file.
    for _ in range(2):
        for _ in tqdm(range(1), desc="epoch"):
            time.sleep(0.3)
            for _ in tqdm(range(3), desc="batch", leave=False):
                time.sleep(0.1)
    print("<b>bold</b><script>window.harmed = 1</script><img src=x onerror='window.harmed=1'>")
    print("\x1b[31mred\x1b[0m \x1b[2J\x1b[Hcleared \x07bell \x1b]0;title\x07after")
    print("\N{PARTY POPPER} \N{LATIN SMALL LETTER E WITH ACUTE} \u8a9e $5 or $6")
    print("10%\r20%\r30%", flush=True)
    os.write(1, b"bad \xff\xfe bytes\n")
    for number in range(50):
        print("needle" if number == 20 else "straw", number, "of", accelerator.process_index)
    step = 0
    while not (pathlib.Path(folder) / "end").exists():
        step += 1
        values = {f"train/m{number}": 1 / step + number for number in range(9)}
        current().metric({"loss": 1 / step, **values, "eval/best": 0.5}, step)
        time.sleep(0.05)
"""
HEIGHT = "Math.round(document.querySelector('.na-panel').getBoundingClientRect().height)"
NOTE_HEIGHTS = f"""() => {{ window.heights = []; window.logs = []; setInterval(() => {{
  if (!document.querySelector('.na-panel table')) return;
  window.heights.push({HEIGHT});
  window.logs.push(document.querySelector('.na-scroll').offsetHeight);
}}, 50) }}"""
HANG = """
def hang():
    import time, torch, torch.distributed as dist
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    if accelerator.process_index == 0:
        dist.all_reduce(torch.ones(1))
    while True:
        time.sleep(0.1)
"""
NOTE_TIMES = """() => {
    window.times = {};
    const look = () => {
        const both = document.querySelectorAll("td.na-running").length > 1;
        if (both) window.times.runs ??= Date.now();
        if (document.body.textContent.includes("the run hangs")) window.times.hangs ??= Date.now();
    };
    look();
    new MutationObserver(look).observe(document.body, {childList: true, subtree: true});
}"""
MANY = """
def many():
    import time
    from tqdm import tqdm
    import os
    rank = int(os.environ["RANK"])
    print("I am", rank)
    for _ in tqdm(range(10_000), initial=100 * rank):
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab"), [INSTALLED]) as lab:
        yield lab


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with open_browser(chromium) as browser:
        yield browser


def start(lab: Lab, browser: Browser, app: str, name: str, *cells: str) -> Notebook:
    lab.write(f"{name}-{app}.ipynb", [SETUP, *cells], INSTALLED)
    notebook = lab.open(browser, f"{name}-{app}.ipynb", app=app)
    notebook.wait_until_idle()
    notebook.run_all()
    return notebook


def wait_for(output: Locator, words: str) -> None:
    output.get_by_text(words).first.wait_for(timeout=30_000)


def choose(output: Locator, label: str, option: str) -> None:
    output.get_by_label(label).select_option(label=option)


@pytest.mark.parametrize("app", APPS)
def test_all_that_can_be_clicked(lab: Lab, browser: Browser, app: str, tmp_path: Path) -> None:
    launch = f"run = notebook_launcher(speak, ({str(tmp_path)!r},), num_processes=2)"
    notebook = start(lab, browser, app, "speak", SPEAK, launch)
    page, output = notebook.page, notebook.output(2)
    page.evaluate(NOTE_HEIGHTS)
    wait_for(output, "straw 49 of 1")
    charts = output.locator(".na-charts")
    charts.locator("polyline").first.wait_for(timeout=30_000)
    # What comes makes the panel higher, in a few steps, and nothing makes it lower.
    heights = page.evaluate("() => window.heights")
    assert heights == sorted(heights), heights
    assert len(set(heights)) <= 6, heights
    assert len({height for height in page.evaluate("() => window.logs") if height}) == 1

    # What ranks print does no harm and is right.
    choose(output, "Output of", "rank 0")
    output.get_by_text("straw 49 of 1").wait_for(state="detached", timeout=30_000)
    for words in (
        "<b>bold</b><script>window.harmed = 1</script>",
        "\N{PARTY POPPER} \N{LATIN SMALL LETTER E WITH ACUTE} \u8a9e $5 or $6",
        "bad \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} bytes",
        "1 lines of rank 0 are in run.logs(0)",
        "after the long line",
    ):
        wait_for(output, words)
    text = output.locator(".na-blocks").inner_text()
    assert "30%" in text
    assert "10%" not in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
    assert page.evaluate("() => window.harmed") is None
    red = output.locator(".na-blocks span").filter(has_text=re.compile("^red$"))
    colour = red.evaluate("span => getComputedStyle(span).color")
    assert colour != output.locator(".na-blocks pre").first.evaluate(
        "pre => getComputedStyle(pre).color"
    )

    # Search, and save.
    output.get_by_label("Search the output").fill("NEEDLE")
    # The lines that are searched for may come after the others are gone.
    output.get_by_text("straw 49 of 0").wait_for(state="detached", timeout=30_000)
    output.get_by_text("needle 20 of 0").wait_for(timeout=30_000)
    assert output.locator(".na-blocks").inner_text().strip() == "needle 20 of 0"
    output.get_by_label("Search the output").fill("")
    wait_for(output, "straw 49 of 0")
    output.get_by_role("button", name="Save").click()
    link = output.locator("a[download]")
    link.wait_for(timeout=30_000)
    with page.expect_download() as download:
        link.click()
    saved = Path(download.value.path()).read_text()
    assert "needle 20 of 0" in saved
    assert len(saved) > 1_000_000

    # Metrics: all can be reached, by group or by page.
    assert charts.locator(".na-chart").count() == 6
    assert "metrics 1-6 of 11" in output.locator(".na-metrics").inner_text()
    height = page.evaluate(HEIGHT)
    output.get_by_role("button", name="→").click()
    charts.get_by_text("eval/best").wait_for(timeout=30_000)
    assert page.evaluate(HEIGHT) == height
    choose(output, "Which metrics", "eval/ (1)")
    page.wait_for_function("() => document.querySelectorAll('.na-chart').length === 1")
    choose(output, "Which metrics", "all (11)")
    page.wait_for_function("() => document.querySelectorAll('.na-chart').length === 6")
    assert charts.locator(".na-chart").first.locator("polyline").count() == 2
    charts.locator(".na-stripes i").nth(3).hover()
    charts.get_by_text(re.compile(r"step \d+: rank 0 .*, rank 1")).locator("visible=true").wait_for(
        timeout=30_000
    )
    choose(output, "Lines", "mean")
    lines = "() => document.querySelectorAll('.na-chart')[0].querySelectorAll('polyline').length"
    page.wait_for_function(f"{lines} === 1", timeout=30_000)
    choose(output, "Scale", "log")
    choose(output, "Smoothing", "smooth 0.9")

    # Where the ranks stand, and where their output is.
    output.get_by_role("button", name="Stacks").click()
    wait_for(output, "stacks after")
    shown = output.locator(".na-stacks").inner_text()
    assert "rank 0" in shown
    assert shown.count("Cell In[2]") == 2
    output.get_by_role("button", name="Log folder").click()
    folder = output.locator(".na-folder code")
    folder.wait_for(timeout=30_000)
    assert (Path(folder.inner_text()) / "rank-1.log").exists()

    # One click on Kill is not enough.
    assert "[*]" in notebook.prompt(2)
    output.get_by_role("button", name="Kill").click()
    output.get_by_role("button", name="Sure?").click()
    wait_for(output, "■ stopped")
    assert output.locator("button").count() == 0
    notebook.close()


def test_a_hang_is_shown_within_fifteen_seconds(lab: Lab, browser: Browser) -> None:
    """In both pages at once, since each takes its time."""
    launch = "run = notebook_launcher(hang, num_processes=2, grace=1)"
    notebooks = []
    for app in APPS:
        notebooks.append(start(lab, browser, app, "hang", HANG, launch))
        # The page itself notes when it shows what: one may be there before the other is looked at.
        notebooks[-1].page.evaluate(NOTE_TIMES)
    outputs = [notebook.output(2) for notebook in notebooks]
    for output in outputs:
        output.get_by_text("the run hangs").first.wait_for(timeout=60_000)
        wait_for(output, "the run hangs: rank 0 waits in all_reduce at Cell In[2], line 6")
        times = output.page.evaluate("() => window.times")
        assert times["hangs"] - times.get("runs", times["hangs"]) < 15_000
        assert output.locator("tbody tr").nth(0).inner_text().split()[1:4] == [
            "waits",
            "in",
            "all_reduce",
        ]
        assert output.locator("tbody tr").nth(1).inner_text().split()[1] == "missing"
        # The stacks are there, and what was unfolded stays so.
        output.get_by_text("stacks of the ranks").click()
    time.sleep(2)
    for output in outputs:
        shown = output.locator(".na-stacks").inner_text()
        assert "all_reduce" in shown
        assert "Cell In[2], line 8" in shown
        output.get_by_role("button", name="Stop").click()
    for notebook, output in zip(notebooks, outputs, strict=True):
        wait_for(output, "■ stopped")
        # What held it up is worth knowing afterwards.
        wait_for(output, "the run hangs: rank 0 waits in all_reduce")
        fold = output.locator("details", has_text="stacks of the ranks")
        assert "Cell In[2], line 8" in (fold.text_content(timeout=30_000) or "")
        notebook.close()


@pytest.mark.parametrize("app", APPS)
def test_of_many_ranks_one_is_picked_by_a_click(lab: Lab, browser: Browser, app: str) -> None:
    launch = "run = notebook_launcher(many, num_processes=18, devices='cpu')"
    notebook = start(lab, browser, app, "many", MANY, launch)
    output = notebook.output(2)
    wait_for(output, "I am 17")
    output.locator(".na-heat i", has_text=re.compile("^17$")).click()
    output.get_by_text("I am 3", exact=True).wait_for(state="detached", timeout=30_000)
    assert output.get_by_label("Output of").evaluate("list => list.selectedIndex") == 18
    wait_for(output, "I am 17")
    # It has a row then, above the slowest.
    rows = output.locator("tbody tr td.na-c-rank")
    output.page.wait_for_function(
        "() => document.querySelector('tbody td.na-c-rank').innerText === '17'", timeout=30_000
    )
    assert rows.all_inner_texts()[1] == "0"
    output.get_by_role("button", name="Stop").click()
    wait_for(output, "■ stopped")
    notebook.close()
