"""Take pictures in a real JupyterLab, with real runs.

    python -m docs.screenshots              those of the pages: a launch, animated, and stills
    python -m docs.screenshots --stills     the stills alone: a hang, a failure and a sweep
    python -m docs.screenshots --all OUT    those to look at after a change of what is drawn

The second ones are of runs with 1, 2, 8 and 64 ranks, of one that hangs, of one in the background
that displays things, of one with knobs, of a sweep, of charts of runs, of the form for settings and
of the doctor (``--only form hang`` of some): each in both themes, in windows of three widths, while
it goes on and when it has ended.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from PIL import Image

from tests.conftest import find_chromium
from tests.notebook.kernels import INSTALLED, ROOT
from tests.notebook.lab import Lab, open_browser, open_lab

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Browser, Locator

    from tests.notebook.lab import Notebook

IMAGES = ROOT / "docs" / "images"
THEMES = ("light", "dark")

# ---- the README's ------------------------------------------------------------------------------

QUICKSTART = ROOT / "notebooks" / "01_quickstart.ipynb"
LAUNCH = "run = notebook_launcher(train, (DigitNet(),), num_processes=2)"
# More to see: smaller batches, and a line an epoch of rank 0.
CHANGES = {
    "epochs=12": "epochs=6",
    "batch_size=32": "batch_size=4",
    '        accelerator.log({"accuracy"': (
        '        accelerator.print(f"epoch {epoch + 1}: accuracy {accuracy:.1%}")\n'
        '        accelerator.log({"accuracy"'
    ),
}
WIDTH = 1080
# Each frame is cut to the highest of the cell's heights.
MAX_HEIGHT = 900
FRAMES_A_SECOND = 4
# Nobody looks at a picture to wait for the first import.
MAX_FRAME_SECONDS = 1.0
LAST_FRAME_SECONDS = 4.0


def capture(lab: Lab, browser: Browser, theme: str) -> None:
    """An animated picture: the cell that launches, until the summary of its run stands there."""
    notebook = nbformat.read(QUICKSTART, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    position = next(i for i, cell in enumerate(cells) if "notebook_launcher(train" in cell.source)
    cells[position].source = LAUNCH
    missing = [text for text in CHANGES if not any(text in cell.source for cell in cells)]
    assert not missing, f"{QUICKSTART.name} no longer has {missing}: adapt CHANGES"
    for cell in cells:
        for before, after in CHANGES.items():
            cell.source = cell.source.replace(before, after)
    notebook.cells = cells[: position + 1]
    notebook.metadata["kernelspec"] = {"name": INSTALLED, "display_name": "Python 3"}
    nbformat.write(notebook, lab.folder / f"{theme}.ipynb")
    page = lab.open(browser, f"{theme}.ipynb", width=WIDTH + 100, height=HEIGHT)
    page.set_theme(theme)
    page.hide_sidebar()
    page.wait_until_idle()
    for number in range(position):
        page.run(number)
    page.wait_until_idle()

    page.run(position)
    summary = page.output(position).get_by_text("✓ succeeded")
    frames: list[Image.Image] = []
    taken_at: list[float] = []
    height = 0.0
    is_over = False
    deadline = time.monotonic() + 120
    while not is_over:
        is_over = summary.count() > 0
        # Anew for each: cells above may grow by an output that comes late.
        place = page.cell(position).bounding_box()
        assert place is not None
        height = max(height, place["height"])
        clip = {"x": place["x"], "y": place["y"], "width": WIDTH, "height": MAX_HEIGHT}
        shot = page.page.screenshot(clip=clip)
        frame = Image.open(io.BytesIO(shot)).convert("RGB")
        if not frames or frame != frames[-1]:
            taken_at.append(time.monotonic())
            frames.append(frame)
        assert time.monotonic() < deadline, "the run has not ended"
        page.page.wait_for_timeout(1000 / FRAMES_A_SECOND)
    frames = [frame.crop((0, 0, WIDTH, min(MAX_HEIGHT, round(height)))) for frame in frames]
    # One palette for all frames, or the colours of what stands still would flicker; of panel and
    # summary, since each has colours that the other lacks, and by coverage, which keeps rare ones
    # such as the red of Stop.
    live, ended = frames[len(frames) // 2], frames[-1]
    sample = Image.new("RGB", (WIDTH, 2 * live.height))
    sample.paste(live, (0, 0))
    sample.paste(ended, (0, live.height))
    palette = sample.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2)
    first, *others = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    shown = [min(later - earlier, MAX_FRAME_SECONDS) for earlier, later in pairwise(taken_at)]
    durations = [1000 * seconds for seconds in [*shown, LAST_FRAME_SECONDS]]
    target = IMAGES / f"launch-{theme}.gif"
    first.save(target, save_all=True, append_images=others, duration=durations, loop=0)
    page.close()


def capture_hang(lab: Lab, browser: Browser) -> None:
    """Pictures of a cell, and of its panel once that says which rank waits where."""
    setup = f"{SETUP}\nimport time, torch\nfrom notebook_accel import Accelerator"
    launch = "notebook_launcher(evaluate, num_processes=2, grace=1)"
    page = _open(lab, browser, "evaluate", EVALUATE, launch, setup=setup)
    said = page.output(2).get_by_text("the run hangs").first
    said.wait_for(timeout=60_000)
    _still(page, "hang", said)
    page.output(2).get_by_role("button", name="Stop").click()
    _wait_for_end(page)
    page.close()


def capture_failure(lab: Lab, browser: Browser) -> None:
    """Pictures of a cell, and of the summary and the error after one of its ranks has failed."""
    page = _open(lab, browser, "labels", CHECK, "notebook_launcher(check, num_processes=2)")
    # The cell's error, without its last lines; before it stands the closed fold of the summary.
    said = page.output(2).locator("pre").nth(1)
    said.wait_for(timeout=60_000)
    _still(page, "failure", said, less=86)
    page.close()


def capture_sweep(lab: Lab, browser: Browser) -> None:
    """Pictures of the panel of a sweep, three of whose trials have ended."""
    launch = "sweep(train, space, metric='loss', concurrent=2, devices='cpu')"
    page = _open(lab, browser, "sweep", TRIALS, launch, setup="from notebook_accel import sweep")
    rows = page.output(2).locator(".na-trials tr")
    rows.filter(has_text="succeeded").nth(2).wait_for(timeout=120_000)
    page.page.wait_for_timeout(1500)
    _still(page, "sweep", page.output(2).locator(".na-trials"), first=2)
    page.output(2).get_by_role("button", name="Stop all").click()
    page.output(2).get_by_text("trials ended").first.wait_for(timeout=60_000)
    page.close()


def _still(page: Notebook, name: str, last: Locator, *, first: int = 1, less: int = 0) -> None:
    """Take pictures in both themes, from cell ``first`` to ``less`` pixels above ``last``'s end."""
    page.page.set_viewport_size({"width": 900, "height": HEIGHT})
    for theme in THEMES:
        page.set_theme(theme)
        page.page.wait_for_timeout(500)
        begin, end = page.cell(first).bounding_box(), last.bounding_box()
        assert begin is not None
        assert end is not None
        height = end["y"] + end["height"] + 10 - less - begin["y"]
        clip = {"x": begin["x"], "y": begin["y"], "width": begin["width"], "height": height}
        shot = Image.open(io.BytesIO(page.page.screenshot(clip=clip)))
        shot.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
            IMAGES / f"{name}-{theme}.png", optimize=True
        )


# ---- all those to look at ----------------------------------------------------------------------

WIDTHS = (400, 600, 1200)
# High enough for the highest panel: what a page scrolls is not in a picture of it.
HEIGHT = 2600
SETUP = "from notebook_accel import config_picker, notebook_launcher"
# Nested bars, metrics, a line now and then, until the file is there.
TRAIN = """
def train(end):
    import math, pathlib, time
    from tqdm.auto import tqdm
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    rank = accelerator.process_index
    step = 0
    for epoch in tqdm(range(12), desc="epochs"):
        for _ in tqdm(range(25 + rank), desc=f"epoch {epoch + 1}", leave=False):
            step += 1
            loss = 2.3 * math.exp(-step / 60) + 0.02 * rank + 0.1 * math.sin(step) ** 2
            accelerator.log({"train/loss": loss, "train/accuracy": 1 - loss / 2.5}, step)
            time.sleep(0.15)
            if pathlib.Path(end).exists():
                if rank == 5:
                    raise ValueError(f"the loss is not finite after {step} steps")
                return loss
        print(f"epoch {epoch + 1}: loss {loss:.4f} on {25 + rank} batches")
"""
EVALUATE = """\
def evaluate():
    accelerator = Accelerator()
    loss = torch.ones(1, device=accelerator.device)
    if not accelerator.is_main_process:
        losses = accelerator.gather(loss)
    time.sleep(60)"""
CHECK = """\
def check():
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    labels = [3, 1, 4, 12]
    with accelerator.split_between_processes(labels) as own:
        for number, label in enumerate(own):
            if label > 9:
                raise ValueError(f"label {label} of sample {number} is no digit")"""
TRIALS = """\
import math, time
space = {"lr": [0.3, 0.1, 0.03], "width": [64, 128]}
def train(lr, width):
    from notebook_accel import Accelerator
    accelerator = Accelerator(cpu=True)
    for step in range(60):
        noise = 0.05 * math.sin(step)
        loss = abs(math.log10(lr) + 1) + 30 / width + 2 * math.exp(-step * lr) + noise
        accelerator.log({"loss": loss}, step)
        time.sleep(0.1)"""
HANG = """
def hang():
    import time, torch, torch.distributed as dist
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    print("rank", accelerator.process_index, "has begun")
    if accelerator.process_index:
        dist.all_reduce(torch.ones(1))
    while True:
        time.sleep(0.1)
"""
DRAW = """
def draw(end):
    import pathlib, time
    import matplotlib.pyplot as plt
    import pandas
    figure, axes = plt.subplots(figsize=(4, 2))
    axes.plot([1, 3, 2, 4])
    display(figure)
    figure, axes = plt.subplots(figsize=(4, 2), facecolor="none")
    axes.set_title("no background")
    display(figure)
    display(pandas.DataFrame({"rank": [0, 1], "loss": [0.31, 0.28]}))
    while not pathlib.Path(end).exists():
        time.sleep(0.1)
"""
PLOT = """
def log(factor):
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    for step in range(30):
        values = {"loss": factor / (step + 1), "accuracy": 1 - factor / (step + 3), "lr": 0.1}
        accelerator.log(values, step)

from notebook_accel import compare, runs as board
runs = [notebook_launcher(log, (i,), num_processes=2, name=f"factor {i}") for i in (1, 2)]
"""
FORM = 'picker = config_picker({"num_processes": 2, "fsdp": {"cpu_offload": True}})\npicker'


def take_training(lab: Lab, browser: Browser, out: Path, number: int) -> None:
    """A training on so many ranks: 2 are stopped by the button, of more than 5 one fails."""
    name = f"{number}-ranks"
    end = lab.folder / name
    launch = f"run = notebook_launcher(train, ({str(end)!r},), num_processes={number}"
    page = _open(lab, browser, name, TRAIN, f"{launch}, devices='cpu')")
    page.output(2).get_by_text("epoch 3: loss").first.wait_for(timeout=180_000)
    _picture(page, out, f"{name}-live")
    if number == 2:
        page.output(2).get_by_role("button", name="Stop").click()
    else:
        end.touch()
    _wait_for_end(page)
    _picture(page, out, f"{name}-ended")
    page.close()


def take_hang(lab: Lab, browser: Browser, out: Path) -> None:
    """Four ranks that hang, with their stacks, until Stop."""
    page = _open(lab, browser, "hang", HANG, "notebook_launcher(hang, num_processes=4, grace=1)")
    page.output(2).get_by_text("the run hangs").first.wait_for(timeout=60_000)
    page.output(2).get_by_text("stacks of the ranks").click()
    _picture(page, out, "hang-live")
    page.output(2).get_by_role("button", name="Stop").click()
    _wait_for_end(page)
    _picture(page, out, "hang-ended")
    page.close()


STEPS = """import time, torch
from notebook_accel import Accelerator, notebook_launcher
class Samples(torch.utils.data.Dataset):
    def __init__(self, wait): self.wait = wait
    def __len__(self): return 4000
    def __getitem__(self, index): time.sleep(self.wait); return torch.ones(64)
def train():
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    samples = Samples(0.008 * (accelerator.process_index == 1))
    loader = torch.utils.data.DataLoader(samples, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            accelerator.log({"loss": loss.item()}, step=step)"""


def take_steps(lab: Lab, browser: Browser, out: Path) -> None:
    """A rank that waits for data: the table of steps in the panel and in the summary."""
    page = _open(lab, browser, "steps", STEPS, "run = notebook_launcher(train, num_processes=2)")
    page.output(2).locator(".na-slow", has_text="waits").wait_for(timeout=60_000)
    _picture(page, out, "steps")
    page.output(2).locator(".na-stop").click()
    _wait_for_end(page)
    _picture(page, out, "steps-end")


def take_displays(lab: Lab, browser: Browser, out: Path) -> None:
    """A run in the background, with figures and a table in its panel."""
    end = lab.folder / "displays"
    launch = f"run = notebook_launcher(draw, ({str(end)!r},), num_processes=2, block=False)"
    page = _open(lab, browser, "displays", DRAW, launch)
    page.output(2).get_by_text("0.31").first.wait_for(timeout=60_000)
    _picture(page, out, "displays-live")
    end.touch()
    _wait_for_end(page)
    _picture(page, out, "displays-ended")
    page.close()


def take_form(lab: Lab, browser: Browser, out: Path) -> None:
    """The form for settings, with a strategy whose options are unfolded."""
    page = _open(lab, browser, "form", TRAIN, FORM)
    page.output(2).get_by_text("No accelerator").first.wait_for(timeout=60_000)
    _picture(page, out, "form")
    page.close()


def take_doctor(lab: Lab, browser: Browser, out: Path) -> None:
    """What is said of this machine."""
    page = _open(lab, browser, "doctor", "%load_ext notebook_accel", "%accelerate doctor")
    page.output(2).get_by_text("torch").first.wait_for(timeout=60_000)
    _picture(page, out, "doctor")
    page.close()


def take_plots(lab: Lab, browser: Browser, out: Path) -> None:
    """Charts of a run, two together with their table, and the table of all runs."""
    page = _open(lab, browser, "plots", PLOT, "display(runs[0].plot(), compare(*runs))\nboard()")
    page.output(2).locator("img").nth(1).wait_for(timeout=60_000)
    _picture(page, out, "plots")
    page.close()


def take_sweep(lab: Lab, browser: Browser, out: Path) -> None:
    """The panel of a sweep with a trial opened, its summary, and the table of runs with it."""
    launch = "s = sweep(train, space, metric='loss', concurrent=2, devices='cpu')"
    setup = "from notebook_accel import runs, sweep"
    page = _open(lab, browser, "trials", TRIALS, launch, "runs()", setup=setup)
    rows = page.output(2).locator(".na-trials tr")
    rows.filter(has_text="succeeded").nth(1).wait_for(timeout=120_000)
    rows.filter(has_text="running").first.click()
    page.output(2).get_by_role("button", name="Save now").wait_for(timeout=60_000)
    _picture(page, out, "sweep")
    _wait_for_end(page)
    _picture(page, out, "sweep-ended")
    page.output(3).locator("summary").first.click()
    _picture(page, out, "board", cell=3)
    page.close()


KNOBS = """
def train(end, decay=0.5, nesterov=False):
    import pathlib, time
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    rate = accelerator.knob("lr", 3e-4, low=1e-6, high=1e-2, log=True)
    kind = accelerator.knob("schedule", "cosine", choices=["cosine", "linear"])
    step = 0
    while not pathlib.Path(end).exists() and not accelerator.should_stop:
        accelerator.log({"loss": 1 / (1 + step * rate.value)}, step)
        step += 1
        time.sleep(0.05)
"""


def take_knobs(lab: Lab, browser: Browser, out: Path) -> None:
    """The panel of a run with knobs, one of which was changed, and paused; then with its clone."""
    end = lab.folder / "knobs-end"
    launch = f"run = notebook_launcher(train, ({str(end)!r},), num_processes=2, block=False)"
    page = _open(lab, browser, "knobs", KNOBS, launch, "run.set(lr=1e-3)")
    page.output(2).get_by_role("button", name="Pause").click()
    page.output(2).get_by_role("button", name="Go on").wait_for(timeout=60_000)
    _picture(page, out, "knobs")
    page.output(2).get_by_role("button", name="Go on").click()
    page.output(2).get_by_role("button", name="Clone").click()
    page.output(2).locator(".na-clone input[type=number]").first.fill("0.25")
    _picture(page, out, "form-of-clone")
    page.output(2).get_by_role("button", name="Start").click()
    page.output(2).locator(".na-below .na-charts path").nth(1).wait_for(timeout=60_000)
    _picture(page, out, "clone")
    end.touch()
    _wait_for_end(page)
    _picture(page, out, "knobs-ended")
    page.close()


SCENES: dict[str, Callable[[Lab, Browser, Path], None]] = {
    **{f"{number}-ranks": partial(take_training, number=number) for number in (1, 2, 8, 64)},
    "hang": take_hang,
    "steps": take_steps,
    "displays": take_displays,
    "form": take_form,
    "doctor": take_doctor,
    "plots": take_plots,
    "sweep": take_sweep,
    "knobs": take_knobs,
}


def _open(lab: Lab, browser: Browser, name: str, *cells: str, setup: str = SETUP) -> Notebook:
    lab.write(f"{name}.ipynb", [setup, *cells], INSTALLED)
    page = lab.open(browser, f"{name}.ipynb", height=HEIGHT)
    page.hide_sidebar()
    page.wait_until_idle()
    page.run_all()
    return page


def _wait_for_end(page: Notebook) -> None:
    # What is drawn when a run has ended has no buttons.
    page.output(2).locator("button").first.wait_for(state="detached", timeout=60_000)


def _picture(page: Notebook, out: Path, name: str, cell: int = 2) -> None:
    """The outputs of a cell, in each width and theme."""
    for theme in THEMES:
        page.set_theme(theme)
        for width in WIDTHS:
            page.page.set_viewport_size({"width": width, "height": HEIGHT})
            # Until the page has laid itself out.
            page.page.wait_for_timeout(500)
            page.output(cell).screenshot(path=out / f"{name}-{width}-{theme}.png")


def main() -> None:
    """Take the README's pictures, or all others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", type=Path, metavar="OUT", help="where all pictures go")
    parser.add_argument("--only", nargs="+", choices=SCENES, default=SCENES, help="which of those")
    parser.add_argument("--stills", action="store_true", help="of the pages' the stills alone")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        open_lab(Path(folder), [INSTALLED]) as lab,
        open_browser(find_chromium() or "chromium") as browser,
    ):
        if options.all is not None:
            options.all.mkdir(parents=True, exist_ok=True)
            for name in options.only:
                SCENES[name](lab, browser, options.all)
            return
        IMAGES.mkdir(parents=True, exist_ok=True)
        for theme in () if options.stills else THEMES:
            capture(lab, browser, theme)
        for still in (capture_hang, capture_failure, capture_sweep):
            still(lab, browser)


if __name__ == "__main__":
    main()
