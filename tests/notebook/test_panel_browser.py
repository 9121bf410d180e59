"""What a person clicks and types, in JupyterLab and in Notebook 7: panel, sessions, form."""

import re
import time
from itertools import groupby
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.notebook.kernels import INSTALLED
from tests.notebook.lab import open_browser, open_lab
from tests.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

SETUP = "%load_ext notebook_accel\nfrom notebook_accel import notebook_launcher"
# What would do harm, or look wrong, in a page that took it as it comes.
SPEAK = r"""
def speak(folder):
    import os, pathlib, time
    from tqdm import tqdm
    from notebook_accel import Accelerator
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
    print("\x1b[32mgreen\nstill green\x1b[0m")
    print("begin " + "long " * 3_000 + "end of the long line")
    os.write(1, b"bad \xff\xfe bytes\n")
    for number in range(50):
        print("needle" if number == 20 else "straw", number, "of", accelerator.process_index)
    step = 0
    while not (pathlib.Path(folder) / "end").exists():
        step += 1
        values = {f"train/m{number}": 1 / step + number for number in range(9)}
        accelerator.log({"loss": 1 / step, **values, "eval/best": 0.5}, step)
        time.sleep(0.05)
"""
HEIGHT = "Math.round(document.querySelector('.na-panel').getBoundingClientRect().height)"
# Those of a cell's output, from before it has any until the run has ended.
NOTE_HEIGHTS = """(number) => {
  const cells = document.querySelectorAll('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell');
  const cell = cells[number];
  window.heights = [];
  clearInterval(window.noting);
  window.noting = setInterval(() => {
    const output = cell.querySelector('.jp-Cell-outputArea');
    if (output && / (succeeded|stopped) /.test(output.innerText)) clearInterval(window.noting);
    else window.heights.push(output ? Math.round(output.getBoundingClientRect().height) : 0);
  }, 50) }"""
SWEEP = """
from notebook_accel import runs, sweep
space = {"lr": [0.3, 0.1, 0.2]}
def trains(lr, slow=False, size=8):
    import time
    from notebook_accel import Accelerator
    accelerator = Accelerator(cpu=True)
    size, rate = accelerator.knob("size", size, low=1, high=64), accelerator.knob("rate", 1)
    for step in range(10_000):
        accelerator.log({"loss": lr + 1 / (step + 1)}, step)
        time.sleep(0.05)
        if accelerator.should_stop:
            return lr, slow, size.value, rate.value
"""
HANG = """
def hang():
    import time, warnings, torch, torch.distributed as dist; warnings.warn("odd")
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    if accelerator.process_index == 0:
        dist.all_reduce(torch.ones(1))
    while True:
        time.sleep(0.1)
"""
MIDDLE_IS_HIGH = """() => {
    const line = document.querySelector(".na-chart path");
    const points = line ? line.getAttribute("d").slice(1).split(" ") : [];
    const middle = points[Math.floor(points.length / 2)] || "0,400";
    return Number(middle.split(",")[1]) < 357;
}"""
POINTED_AT = """() => {
    const place = document.querySelector(".na-stripes i:hover");
    return place && /step [0-9]+: 0/.test(getComputedStyle(place, "::after").content);
}"""
LABELS_FIT = """() => {
    const labels = [...document.querySelectorAll(".na-c-label")];
    const fits = labels.every((label) => label.scrollWidth <= label.clientWidth);
    // A long word for a state makes its row no higher.
    const rows = [...document.querySelectorAll(".na-ranks tbody tr")];
    const areAlike = new Set(rows.map((row) => row.offsetHeight)).size === 1;
    return document.querySelector(".na-panel").clientWidth < 400 && fits && areAlike;
}"""
# What the panel says of a hang when it first does.
NOTE_HANG = """() => new MutationObserver(() => {
    window.said ??= document.querySelector(".na-hang")?.textContent;
}).observe(document.body, {childList: true, subtree: true})"""
NAME_OF_FOCUSED = """() => {
    const found = document.activeElement;
    return (found.labels?.[0] ?? found).textContent;
}"""
CLOCK = "document.querySelector('.na-clock').textContent"
MANY = """
def many():
    import time
    from tqdm import tqdm
    import os
    rank = int(os.environ["RANK"])
    print("I am", rank)
    for _ in tqdm(range(10_000), initial=100 * rank):
        time.sleep(0.2)
"""


@pytest.fixture(scope="module", params=["lab", pytest.param("notebook", marks=pytest.mark.long)])
def notebook(request, tmp_path_factory, chromium):
    """One in each app, with a kernel of its own: all tests add their cells to it."""
    folder = tmp_path_factory.mktemp("lab")
    with open_lab(folder, [INSTALLED]) as lab, open_browser(chromium) as browser:
        lab.write("book.ipynb", [SETUP], INSTALLED)
        notebook = lab.open(browser, "book.ipynb", app=request.param)
        notebook.wait_until_idle()
        notebook.run(0)
        yield notebook
        assert notebook.elsewhere == [], "no code comes from another server"
        notebook.close()


def wait_for(output, words):
    output.get_by_text(words).first.wait_for(timeout=30_000)


def choose(output, label, option):
    output.get_by_label(label).select_option(label=option)


def zoom_by_two_clicks(output):
    """From a third of the first chart's width to two thirds, while the panel is drawn anew."""
    stripes, steps = output.locator("[data-steps]").first, output.get_by_label("Steps")
    # In one look: the chart that is found is replaced five times a second.
    width = output.evaluate("it => it.querySelector('[data-steps]').getBoundingClientRect().width")
    place = {"x": width / 3, "y": 20}
    stripes.click(position=place)
    expect(steps).to_have_value(re.compile(r"^\d+ to$"))
    before = output.page.evaluate(f"() => {CLOCK}")
    output.page.wait_for_function(f"(before) => {CLOCK} !== before", arg=before, timeout=30_000)
    stripes.click(position={**place, "x": 2 * place["x"]})
    expect(steps).to_have_value(re.compile(r"^\d+ to \d+$"))
    low, high = steps.input_value().split(" to ")
    assert 1 < int(low) < int(high)
    words = re.compile(rf"^{low}step {high}$")
    expect(output.locator(".na-chart-steps").first).to_have_text(words, timeout=30_000)


def heights_of_run(notebook):
    """The heights that the output of the run had, one after the other."""
    return [height for height, _ in groupby(notebook.page.evaluate("() => window.heights"))]


def test_a_sweep_opens_stops_and_clones_trials_by_mouse_and_keeps_table_and_chart(notebook):
    notebook.add(SWEEP)
    number = notebook.insert("s = sweep(trains, space, metric='loss', concurrent=3, devices='cpu')")
    notebook.run(number)
    output = notebook.output(number)
    row = lambda trial: output.locator(f".na-trials tr[data-n='{trial}']")  # noqa: E731
    expect(row(2)).to_contain_text("█", timeout=90_000)
    expect(output.locator(".na-trials tbody tr").first).to_contain_text("0.1")
    expect(output.locator(".na-together path")).to_have_count(2)
    said = output.locator(".na-together [data-said*='trial']").nth(3)
    said.hover()
    expect(said).to_have_attribute("data-said", re.compile(r"trial \d \(lr=.*\) "))
    chosen = output.get_by_label("Trial", exact=True).locator("option:checked")
    expect(chosen).to_have_text("open a trial")
    row(0).click()
    panel = output.locator(".na-panel:not(.na-sweep)")
    expect(panel).to_contain_text("lr=0.3", timeout=30_000)
    panel.locator(".na-charts path").first.wait_for()
    output.get_by_role("button", name="Clone").click()
    output.locator(".na-clone input").first.fill("0.05")
    output.get_by_role("button", name="Start").click()
    expect(output.locator(".na-sweep")).to_contain_text("trial 3 is added: lr=0.05")
    panel.get_by_role("button", name="Stop").click()
    expect(row(0)).to_contain_text("■ stopped")
    expect(row(3)).to_contain_text("0.05", timeout=60_000)
    output.get_by_role("button", name="Stop all").click()
    expect(output).to_contain_text("sweep of trains: 4 of 4 trials ended", timeout=60_000)
    expect(output.locator("img")).not_to_have_count(0)
    expect(output.locator("table").first.locator("tr")).to_have_count(5)
    expect(output.locator(".na-panel")).to_have_count(0)
    told = notebook.add("print(s.runs[3].results, s.runs[3].state.origin == s.runs[0].id)")
    expect(told).to_have_text("[(0.05, False, 8, 1)] True")


@pytest.mark.parametrize("first", ["original", pytest.param("clone", marks=pytest.mark.long)])
def test_a_run_is_cloned_by_mouse_and_both_end_in_one_summary(notebook, first):
    notebook.add(SWEEP)
    number = notebook.insert("notebook_launcher(trains, (0.3,), num_processes=1)")
    notebook.run(number)
    output = notebook.output(number)
    rate = output.get_by_label("rate")
    rate.fill("2", timeout=60_000)
    rate.press("Enter")
    expect(output.locator(".na-stripes u").first).to_be_attached(timeout=30_000)
    output.get_by_role("button", name="Clone").click()
    form = output.locator(".na-clone")
    form.get_by_label("lr").fill("0.1")
    form.get_by_label("slow").check()
    size = form.locator(".widget-readout")
    size.fill("32")
    size.press("Enter")
    output.get_by_role("button", name="Start").dblclick()
    clone = output.locator(".na-below .na-panel")
    expect(clone).to_contain_text("pale: trains (lr=0.3", timeout=60_000)
    expect(clone.locator(".na-charts path")).to_have_count(2)
    expect(clone).to_have_count(1)
    _check_in_windows(notebook, (600, 400), _CLONE_HAS_ONE_LINE)
    # The summary of the one stands where its panel was, and the other one goes on.
    both = output.get_by_role("button", name="Stop")
    (both.first if first == "original" else both.last).click()
    output.get_by_text("✓ succeeded").first.wait_for(timeout=60_000)
    expect(output.get_by_role("button", name="Pause")).to_be_enabled()
    if first == "original":  # its cell has ended
        compared = notebook.add("from notebook_accel import compare, last_run\ncompare(last_run())")
        expect(compared.locator("table.na-runs td").first).to_have_css("text-align", "left")
    both.click()
    expect(output.locator("button")).to_have_count(0, timeout=60_000)
    expect(output.locator("b").filter(has_text="lr=0.1")).to_have_count(1)
    expect(output.locator("b").filter(has_text="trains")).to_have_count(1)
    ended = notebook.add("print(*(run.results for run in runs()[-2:]))")
    expect(ended).to_have_text("[(0.3, False, 8, 2)] [(0.1, True, 32, 2)]")


def test_all_that_can_be_clicked(notebook, tmp_path):
    page = notebook.page
    # Longer than a page of a busy machine needs for the second click.
    patient = "from notebook_accel.notebook import live_panel\nlive_panel._SURE_SECONDS = 60.0"
    notebook.add(f"{SPEAK}\n{patient}")
    number = notebook.insert(
        f"run = notebook_launcher(speak, ({str(tmp_path)!r},), num_processes=2)"
    )
    page.evaluate(NOTE_HEIGHTS, number)
    notebook.run(number)
    output = notebook.output(number)
    # The first launch of a kernel waits until ranks can be started.
    output.get_by_text("straw 49 of 1").first.wait_for(timeout=60_000)
    charts = output.locator(".na-charts")
    charts.locator("path").first.wait_for(timeout=30_000)
    # Two rows of charts make it higher once more.
    heights = heights_of_run(notebook)
    assert heights == sorted(heights), heights
    assert len(heights) <= 4, heights
    check_layout(notebook)
    # Of the first lines of the log that are in sight one says which rank has printed them.
    page.wait_for_function(f"() => ({_TAGS_STAY})().every(Boolean)", timeout=30_000)

    # What ranks print does no harm and is right.
    choose(output, "Output of", "rank 0")
    output.get_by_text("straw 49 of 1").wait_for(state="detached", timeout=30_000)
    for words in (
        "<b>bold</b><script>window.harmed = 1</script>",
        "\N{PARTY POPPER} \N{LATIN SMALL LETTER E WITH ACUTE} \u8a9e $5 or $6",
        "bad \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} bytes",
        "1 more of rank 0: run.logs(0) has all lines",
        "after the long line",
        "begin long long",
        "[…]",
        "long end of the long line",
    ):
        wait_for(output, words)
    text = output.locator(".na-blocks").inner_text()
    assert "30%" in text
    assert "10%" not in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
    assert page.evaluate("() => window.harmed") is None
    red = output.locator(".na-blocks span").filter(has_text=re.compile("^red$"))
    colour = red.evaluate("span => getComputedStyle(span).color")
    plain = output.locator(".na-blocks pre").first.evaluate("pre => getComputedStyle(pre).color")
    assert colour != plain
    green = output.locator(".na-blocks span").filter(has_text=re.compile("still green$"))
    assert green.evaluate("span => getComputedStyle(span).color") not in (colour, plain)

    # Search, and save.
    output.get_by_label("Search the output").fill("NEEDLE")
    # The lines that are searched for may come after the others are gone.
    output.get_by_text("straw 49 of 0").wait_for(state="detached", timeout=30_000)
    output.get_by_text("needle 20 of 0").wait_for(timeout=30_000)
    expect(output.locator(".na-blocks")).to_have_text(re.compile(r"^\s*needle 20 of 0\s*$"))
    output.get_by_label("Search the output").fill("")
    wait_for(output, "straw 49 of 0")
    output.get_by_role("button", name="Save", exact=True).click()
    link = output.locator("a[download]")
    link.wait_for(timeout=30_000)
    with page.expect_download() as download:
        link.click()
    saved = Path(download.value.path()).read_text()
    assert "needle 20 of 0" in saved
    assert len(saved) > 1_000_000

    # Metrics: all can be reached, by group or by page.
    expect(charts.locator(".na-chart")).to_have_count(6)
    expect(output.locator(".na-metrics")).to_contain_text("metrics 1-6 of 11")
    height = page.evaluate(HEIGHT)
    choose(output, "Which metrics", "metrics 7-11 of 11")
    charts.get_by_text("eval/best").wait_for(timeout=30_000)
    assert page.evaluate(HEIGHT) == height
    choose(output, "Which metrics", "eval/ (1)")
    page.wait_for_function("() => document.querySelectorAll('.na-chart').length === 1")
    choose(output, "Which metrics", "metrics 1-6 of 11")
    page.wait_for_function("() => document.querySelectorAll('.na-chart').length === 6")
    expect(charts.locator(".na-chart").first.locator("path")).to_have_count(1)
    charts.locator(".na-stripes i").nth(3).hover()
    page.wait_for_function(POINTED_AT, timeout=30_000)
    choose(output, "Scale", "log")
    # Halfway down the steps one over the step is nearly zero, but not its logarithm.
    page.wait_for_function(MIDDLE_IS_HIGH, timeout=30_000)
    choose(output, "Smoothing", "smooth 0.9")
    # The values themselves are pale behind it.
    expect(charts.locator(".na-chart").first.locator("path")).to_have_count(2)
    choose(output, "Smoothing", "as logged")
    zoom_by_two_clicks(output)
    output.get_by_role("button", name="CSV").click()
    link = output.locator(".na-csv a[download]")
    link.wait_for(timeout=30_000)
    with page.expect_download() as download:
        link.click()
    low, high = map(int, output.get_by_label("Steps").input_value().split(" to "))
    found = [line.split(",") for line in Path(download.value.path()).read_text().splitlines()]
    assert found[0] == ["metric", "step", "value"]
    losses = [(int(step), float(value)) for name, step, value in found[1:] if name == "loss"]
    assert losses == [(step, 1 / step) for step in range(low, high + 1)]
    # A double click shows all steps again.
    charts.locator("[data-steps]").first.dblclick()
    expect(output.get_by_label("Steps")).to_have_value("")
    expect(charts.locator(".na-chart-steps").first).to_contain_text(re.compile("^1step"))

    # Where the ranks stand, and where their output is.
    output.get_by_role("button", name="Stacks").click()
    wait_for(output, "stacks after")
    shown = output.locator(".na-stacks").inner_text()
    # Both ranks may stand at the same line.
    assert re.search("ranks 0-1|rank 0.*rank 1", shown, re.DOTALL)
    num_stacks = len(re.findall(r"Cell In\[\d+\]", shown))
    assert num_stacks in (1, 2)
    output.get_by_role("button", name="Log folder").click()
    folder = output.locator(".na-folder code")
    folder.wait_for(timeout=30_000)
    assert (Path(folder.inner_text()) / "rank-1.log").exists()

    # One click on Kill is not enough.
    assert "[*]" in notebook.prompt(number)
    stop = output.get_by_role("button", name="Stop")
    place = stop.bounding_box()
    output.get_by_role("button", name="Kill").click()
    sure = output.get_by_role("button", name="Sure?")
    sure.wait_for(timeout=30_000)
    assert stop.bounding_box() == place
    sure.click()
    wait_for(output, "■ stopped")
    expect(output.locator("button")).to_have_count(0)
    # The table has columns in each window, and scrolls in a narrow one.
    _check_in_windows(notebook, (400, 600), _HAS_COLUMNS)
    # What was asked for is worth keeping.
    fold = output.locator("details", has_text="stacks after").text_content() or ""
    assert len(re.findall(r"Cell In\[\d+\]", fold)) == num_stacks


def test_a_hang_is_shown_within_fifteen_seconds(notebook):
    notebook.page.evaluate(NOTE_HANG)
    notebook.add(HANG)
    output = notebook.add("run = notebook_launcher(hang, num_processes=2, grace=1)")
    output.get_by_text("the run hangs").first.wait_for(timeout=60_000)
    where = r"the run hangs: rank 0 waits in all_reduce at Cell In\[\d+\], line 6"
    wait_for(output, re.compile(where))
    # A page may come to it only when the ranks have gone quiet: since when, the panel says.
    said = output.page.evaluate("() => window.said")
    since = re.search(r"Nothing has moved for 0:(\d\d):", said)
    assert int(since[1]) < 15, said
    rows = output.locator("tbody tr")
    expect(rows.nth(0)).to_contain_text(re.compile(r"waits\s*in all_reduce"))
    expect(rows.nth(1)).to_contain_text("elsewhere")
    # On a narrow page the collective can be read, too.
    _check_in_windows(notebook, (400,), LABELS_FIT)
    # The stacks are there, and what was unfolded stays so when the panel is drawn anew.
    output.get_by_text("1 warning").click()
    output.get_by_text("stacks of the ranks").click()
    before = output.page.evaluate(f"() => {CLOCK}")
    output.page.wait_for_function(f"(before) => {CLOCK} !== before", arg=before, timeout=30_000)
    shown = output.locator(".na-stacks").inner_text()
    assert "all_reduce" in shown
    assert re.search(r"Cell In\[\d+\], line 8", shown)
    expect(output.get_by_text("UserWarning: odd (ranks 0-1)")).to_be_visible()
    output.get_by_role("button", name="Stop").click()
    wait_for(output, "■ stopped")
    # What held it up is worth knowing afterwards.
    wait_for(output, "the run hangs: rank 0 waits in all_reduce")
    fold = output.locator("details", has_text="stacks of the ranks")
    text = fold.text_content(timeout=30_000) or ""
    assert re.search(r"Cell In\[\d+\], line 8", text)


@pytest.mark.long
def test_of_many_ranks_one_is_picked_by_a_click(notebook):
    notebook.add(MANY)
    output = notebook.add("run = notebook_launcher(many, num_processes=17, devices='cpu')")
    wait_for(output, "I am 16")
    check_layout(notebook)
    cell, page = output.locator(".na-heat i", has_text=re.compile("^16$")), output.page
    cell.hover()
    page.mouse.down()
    # Nobody's finger is faster than the panel, which is drawn anew before the button is up again.
    page.wait_for_function("cell => !cell.isConnected", arg=cell.element_handle(), timeout=30_000)
    page.mouse.up()
    output.get_by_text("I am 3", exact=True).wait_for(state="detached", timeout=30_000)
    expect(output.get_by_label("Output of")).to_have_js_property("selectedIndex", 17)
    wait_for(output, "I am 16")
    # It has a row then, above the slowest.
    rows = output.locator("tbody tr td.na-c-rank")
    expect(rows.nth(0)).to_have_text("16")
    expect(rows.nth(1)).to_have_text("0")
    # The keyboard does as well as the mouse: it comes to all of it, in the order of the page.
    output.get_by_role("button", name="Stop").focus()
    names = []
    for _ in range(8):
        output.page.keyboard.press("Tab")
        names.append(output.page.evaluate(NAME_OF_FOCUSED))
    assert names[:4] == ["Save now", "Pause", "Clone", "Kill"]
    assert names[4:] == ["Stacks", "Log folder", "Output of", "Search the output"]
    output.get_by_role("button", name="Stop").press("Space")
    wait_for(output, "■ stopped")


FAIL = """
def fail():
    def ping(depth):
        pong(depth)
    def pong(depth):
        if depth == 0:
            raise ValueError("bad batch " + 50 * "of many words " + "to the last word")
        ping(depth - 1)
    ping(20)
"""
# Both ends of the last words of a text, in a box that scrolls.
LAST_WORDS = """(box) => {
  const text = document.createTreeWalker(box, NodeFilter.SHOW_TEXT).nextNode();
  const range = document.createRange();
  range.setStart(text, text.data.lastIndexOf('to the last word'));
  range.setEnd(text, text.data.trimEnd().length);
  box.scrollTop = box.scrollHeight;
  const words = range.getBoundingClientRect(), frame = box.getBoundingClientRect();
  return [words.top >= frame.top, words.bottom <= frame.bottom, words.right <= frame.right];
}"""
# A summary is sent twice, which closes its folds; the next cell runs when that is over.
AWAIT_END = """
import threading
for thread in threading.enumerate():
    if thread.name == "notebook-accel-panel":
        thread.join()
print("all was sent")
"""


def test_a_failed_run_has_its_traceback_in_a_fold_that_shows_the_last_line(notebook):
    notebook.add(FAIL)
    output = notebook.add("run = notebook_launcher(fail, num_processes=2)")
    wait_for(output, "✗ failed")
    wait_for(notebook.add(AWAIT_END), "all was sent")
    # In the summary, and below the traceback in the cell's own error.
    in_sight = lambda: output.inner_text().count("ValueError: bad batch")  # noqa: E731
    eventually(lambda: in_sight() == 2, within=30, what="the error was shown twice")
    output.locator("summary", has_text="traceback").click()
    traceback = output.locator("details[open] pre")
    traceback.wait_for(timeout=30_000)
    assert traceback.evaluate(LAST_WORDS) == [True, True, True]


ENDLESS = """
print("goes on", flush=True)
while True:
    time.sleep(0.05)
"""
DRAWN = (
    "<svg xmlns='http://www.w3.org/2000/svg' width='40' height='20'>"
    "<rect width='40' height='20' fill='red'/></svg>"
)


def test_a_session_by_mouse_and_keyboard(notebook):
    output = notebook.add(
        "%%accelerate -n 2\nimport os, time\npid, far_away_name = os.getpid(), rank\nrank * 10"
    )
    output.get_by_text("rank 0: 0 rank 1: 10").wait_for(timeout=60_000)
    expect(output.locator("button")).to_have_count(0)

    # A cell that lasts gets its panel, whose Stop ends it; the page's own Interrupt ends another.
    output = notebook.add(f"%%accelerate{ENDLESS}")
    output.get_by_role("button", name="Stop").click()
    wait_for(output, "■ stopped")
    output = notebook.add(f"%%accelerate{ENDLESS}")
    output.get_by_role("button", name="Stop").wait_for(timeout=30_000)
    notebook.interrupt()
    wait_for(output, "KeyboardInterrupt")

    # The ranks are the same ones afterwards, and what one draws is seen, below its number.
    output = notebook.add("%%accelerate\npid == os.getpid(), far_away_name")
    wait_for(output, "rank 0: (True, 0) rank 1: (True, 1)")
    output = notebook.add(
        f"%%accelerate\nfrom IPython.display import SVG, display\ndisplay(SVG({DRAWN!r}))"
    )
    output.get_by_text("rank 0", exact=True).wait_for(timeout=30_000)
    picture = output.locator("img")
    picture.wait_for(timeout=30_000)
    is_drawn = "image => image.complete && image.naturalWidth === 40"
    notebook.page.wait_for_function(is_drawn, arg=picture.element_handle(), timeout=30_000)

    complete_and_run(notebook)
    look_into_an_error(notebook)

    # In the background it leaves the notebook free, and Stop works there, too.
    output = notebook.add(f"%%accelerate --bg{ENDLESS}")
    stop = output.get_by_role("button", name="Stop")
    stop.wait_for(timeout=30_000)
    wait_for(notebook.add("print('free')"), "free")
    stop.click()
    wait_for(output, "■ stopped")
    blank = output.locator(".jp-OutputArea-child").filter(has_not_text=re.compile(r"\S"))
    heights = "all => all.map(each => each.getBoundingClientRect().height)"
    is_flat = lambda: not any(blank.evaluate_all(heights))  # noqa: E731
    eventually(is_flat, within=30, what="blank outputs took no room")
    wait_for(notebook.add("%%accelerate\n'once ' + 'more'"), "ranks 0-1: 'once more'")


def complete_and_run(notebook):
    """Have Tab complete a name of the session in a cell of the notebook, which has no such name."""
    number = notebook.insert("")
    notebook.cell(number).scroll_into_view_if_needed()
    editor = notebook.cell(number).locator(".cm-content")
    editor.click()
    notebook.page.keyboard.type("far_aw")
    notebook.page.keyboard.press("Tab")
    # The only completion is taken at once; of several one is chosen.
    choice = notebook.page.locator(".jp-Completer-item", has_text="far_away_name")
    completed = editor.get_by_text("far_away_name")
    completed.or_(choice).first.wait_for(timeout=60_000)
    if choice.first.is_visible():
        choice.first.click()
    completed.wait_for(timeout=30_000)
    notebook.run(number)
    wait_for(notebook.output(number), "lives in the session: `%accelerate pull far_away_name`")


def look_into_an_error(notebook):
    """Type commands of the debugger below a cell, as long as it asks for them."""
    failing = "%%accelerate\nfound = rank + 8640\nif rank == 1:\n    found / 0"
    wait_for(notebook.add(failing), "`%accelerate debug` looks into its frames")
    output = notebook.add("%accelerate debug")
    type_command(output, "p found")
    wait_for(output, "8641")
    type_command(output, "q")
    output.locator(".jp-Stdin-input").first.wait_for(state="detached", timeout=30_000)


def type_command(output, command):
    """Type a line where the cell asks for one; the field of the line before stays a moment."""
    is_asked = "output => [...output.querySelectorAll('.jp-Stdin-input')].at(-1)?.value === ''"
    output.page.wait_for_function(is_asked, arg=output.element_handle(), timeout=30_000)
    field = output.locator(".jp-Stdin-input").last
    field.fill(command)
    field.press("Enter")


@pytest.mark.long
def test_the_doctor_sees_the_widgets_of_this_server(notebook):
    output = notebook.add("%accelerate doctor")
    wait_for(output, re.compile(r"jupyterlab-manager 5\.\S+ in the Jupyter server"))
    pre = output.locator("pre").first
    assert pre.evaluate("pre => getComputedStyle(pre).wordBreak") == "normal", "whole words"


FORM = """
import pathlib, time
from IPython.display import HTML, display
from notebook_accel import config_picker
def train(rate, epochs=1):
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    display(HTML(f"<b>drawn by rank {{accelerator.process_index}}</b>"))
    while not pathlib.Path({seen!r}).exists():
        time.sleep(0.02)
    kind, steps = accelerator.distributed_type.value, accelerator.gradient_accumulation_steps
    return kind, accelerator.num_processes, steps, rate, epochs
def quick():
    from notebook_accel import Accelerator
    return Accelerator().gradient_state.num_steps, "quick"
picker = config_picker({{"num_processes": 1}})
picker
"""

CODE_SCROLLS = """() => {
  const code = document.querySelector('.na-picker pre'), box = code.getBoundingClientRect();
  const form = document.querySelector('.na-picker').getBoundingClientRect();
  return innerWidth === 400 && box.right <= form.right && code.scrollWidth > code.clientWidth
    && code.querySelector('br') === null && getComputedStyle(code).whiteSpace === 'pre';
}"""
HAS_PLAIN_LISTS = """() => [...document.querySelectorAll('.na-picker select')].every(
  (list) => getComputedStyle(list).backgroundImage === 'none')"""


def test_a_training_is_picked_saved_loaded_and_launched_by_mouse(notebook, tmp_path):
    form = notebook.add(FORM.format(seen=str(tmp_path / "seen")))
    # It has some 150 widgets, each of which the page asks for: a busy machine takes long.
    form.get_by_text("No accelerator").or_(form.get_by_label("Devices")).first.wait_for(
        timeout=120_000
    )
    # What one comes for stands out, and an arrow has the colour of its text, in a dark theme too.
    launch = form.get_by_role("button", name="Launch")
    expect(launch).to_have_class(re.compile("mod-primary"))
    notebook.page.wait_for_function(HAS_PLAIN_LISTS, timeout=30_000)
    # The mouse alone is enough.
    form.get_by_label("Function", exact=True).select_option(label="quick")
    wait_for(form, "notebook_launcher(quick")
    before = launch.bounding_box()
    form.get_by_label("Mixed precision", exact=True).select_option(label="bf16")
    wait_for(form, "mixed_precision='bf16'")
    # Under a pointer that moves to it, it stays where it is.
    assert launch.bounding_box() == before
    launch.click()
    form.get_by_text("✓ succeeded").first.wait_for(timeout=60_000)
    said = notebook.add("print(picker.run[0], picker.run.config.mixed_precision)")
    wait_for(said, "(1, 'quick') bf16")
    expect(launch).to_be_enabled()
    form.get_by_label("Mixed precision", exact=True).select_option(index=0)

    # What is seldom set is folded; it opens and closes in its place.
    port = form.get_by_label("Port", exact=True)
    for is_open in (False, True, False):
        expect(port).to_be_visible(visible=is_open)
        form.get_by_role("button", name="More settings").click()
    form.get_by_role("button", name="More settings").click()

    # A bad value is told while it is typed, and there is nothing to launch then.
    form.get_by_label("Processes", exact=True).fill("zero")
    wait_for(form, "expected a whole number")
    expect(launch).to_be_disabled()
    form.get_by_label("Processes", exact=True).fill("2")
    form.get_by_label("Accumulation", exact=True).fill("4")
    wait_for(form, "gradient_accumulation_steps=4")

    # A strategy unfolds its options; what was saved comes back.
    strategy = form.get_by_label("Strategy", exact=True)
    option = form.get_by_label("min_num_params", exact=True)
    expect(option).to_be_hidden()
    strategy.select_option(label="FSDP")
    option.fill("1000")
    wait_for(form, "fsdp={'min_num_params': 1000}")
    form.get_by_label("File", exact=True).fill(str(tmp_path / "picked.yaml"))
    form.get_by_role("button", name="Save").click()
    wait_for(form, "Saved to")
    strategy.select_option(label="Data parallel (DDP)")
    option.wait_for(state="hidden", timeout=30_000)
    form.get_by_role("button", name="Load").click()
    wait_for(form, "Loaded from")
    expect(option).to_be_visible()
    expect(option).to_have_value("1000")

    form.get_by_label("Function", exact=True).select_option(label="train")
    form.get_by_label("Arguments", exact=True).fill("0.5, epochs=3")
    wait_for(form, "notebook_launcher(train, args=(0.5,), kwargs=dict(epochs=3)")
    # The code is copied by a click, and on a narrow page its lines are scrolled, never wrapped.
    page = notebook.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    form.get_by_role("button", name="Copy").locator("visible=true").click()
    copied = str(page.evaluate("navigator.clipboard.readText()"))
    assert "\nrun = notebook_launcher(train, args=(0.5,), kwargs=dict(epochs=3), config" in copied
    _check_in_windows(notebook, (400,), CODE_SCROLLS)
    launch.click()
    # What rank 0 displays is there while it trains, and in the end.
    drawn = form.get_by_text("drawn by rank 0")
    drawn.wait_for(timeout=60_000)
    (tmp_path / "seen").touch()
    form.get_by_text("✓ succeeded").first.wait_for(timeout=60_000)
    drawn.wait_for(timeout=30_000)
    assert form.get_by_text("drawn by rank 1").count() == 0
    said = notebook.add("print(picker.config.num_processes, [*picker.run][1])")
    wait_for(said, "2 ('FSDP', 2, 4, 0.5, 3)")

    # After a restart it looks dead, and says what to do.
    notebook.restart()
    notebook.page.wait_for_function(
        "() => getComputedStyle(document.querySelector('.na-picker'), '::after').content"
        ".includes('Run its cell again')",
        timeout=30_000,
    )
    expect(launch).to_be_hidden()
    assert notebook.count_broken_links() == 0
    notebook.wait_until_idle()


TURNED = """
def turned(folder):
    import pathlib, time
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    lr = accelerator.knob("lr", 0.001, low=1e-5, high=0.1, log=True)
    accelerator.knob("dropout", 0.1, low=0, high=0.5)
    accelerator.knob("loss", "l2", choices=["l1", "l2", "a long name of a loss"])
    accelerator.knob("augment", True)
    accelerator.knob("clip", 1.0)
    step, saved = 0, 0
    while not accelerator.should_stop and not (pathlib.Path(folder) / "turned").exists():
        step += 1
        saved += accelerator.should_save
        accelerator.log({"train/loss": 1 / step, "accuracy": 1 - 1 / step}, step)
        time.sleep(0.02)
    return lr.value, saved
"""


def test_knobs_pause_and_save_act_while_the_cell_waits(notebook, tmp_path):
    notebook.add(f"{SETUP}\n{TURNED}")  # the kernel may be a new one
    output = notebook.add(
        f"turning = notebook_launcher(turned, args=({str(tmp_path)!r},), num_processes=2)"
    )
    button = lambda name: output.get_by_role("button", name=name, exact=True)  # noqa: E731
    slider = output.get_by_role("slider").first
    slider.wait_for(timeout=60_000)
    expect(output.locator(".na-knob")).to_have_count(5)
    readout = output.locator(".na-knob .widget-readout").first
    expect(readout).to_have_text("0.00100")

    slider.press("PageUp")
    expect(readout).not_to_have_text("0.00100")
    expect(output.locator(".na-stripes u").first).to_be_attached(timeout=30_000)
    expect(output.locator(".na-knob-now").first).to_have_text("")
    assert "knob/" not in output.locator(".na-charts").inner_text()

    button("Pause").click()
    expect(output.locator(".na-status")).to_have_text("paused", timeout=30_000)
    expect(output.locator("td.na-paused")).to_have_count(2)
    slider.press("PageUp")
    expect(output.locator(".na-knob-now").first).to_contain_text("now 0.00")
    button("Go on").click()
    expect(output.locator(".na-status")).to_have_text("running", timeout=30_000)
    expect(output.locator(".na-knob-now").first).to_have_text("", timeout=30_000)
    taken = float(readout.inner_text())

    field = output.get_by_role("spinbutton").first
    field.fill("2.5")
    field.press("Enter")
    button("Save now").click()
    expect(output.locator(".na-said")).to_contain_text(
        "Save now: done on all ranks", timeout=30_000
    )
    check_layout(notebook)

    (tmp_path / "turned").touch()
    ended = notebook.add("print(turning[0][0], turning[0][1], turning.state.knobs['clip'].value)")
    expect(ended).to_contain_text(" 1 2.5", timeout=60_000)
    assert float(ended.inner_text().split()[0]) == pytest.approx(taken, rel=0.01)


# ---- whether a panel is legible in windows of several widths ----------------------------------

# What is cut, out of the panel or over something else, in a window of that width. Names may be cut.
_FAULTS = """(width) => {
  const notebook = document.querySelector('.jp-NotebookPanel');
  if (notebook.getBoundingClientRect().right > width + 1) return ['not laid out yet'];
  const panel = document.querySelector('.na-panel');
  const faults = panel.scrollWidth > panel.clientWidth ? ['the panel is too wide'] : [];
  const bar = panel.querySelector('.na-log .na-log-bar');
  if (bar.clientHeight > 40) faults.push('the bar above the log has two lines');
  // Whole lines of 18 px, and 8 px below them: the first one is not cut.
  const log = panel.querySelector('.na-scroll');
  if ((log.clientHeight - 8) % 18) faults.push(`the log is ${log.clientHeight} px high`);
  const buttons = panel.querySelector('.na-buttons');
  const places = new Set([...buttons.children].map((one) => one.getBoundingClientRect().left));
  if (panel.clientWidth > 460) {
    if (buttons.clientHeight > 50) faults.push('the buttons have two lines');
  } else if (places.size > 4) faults.push('the lines of buttons have no columns');
  const shown = [];
  const names = '.na-c-label, .na-name';
  for (const part of panel.querySelectorAll(`.na-title span, .na-title b, th, td, button, select,
      .na-log-bar input, .na-log-title, .na-chart-head > *, progress`)) {
    let box = part.getBoundingClientRect();
    // Where it has no room, it is wholly out of sight.
    const line = part.parentElement.getBoundingClientRect();
    if (part.matches('.na-best') && box.top >= line.bottom) continue;
    if (!box.width || part.matches('td:has(progress), :is(span, b, th, td):empty')) continue;
    const text = part.textContent.trim() || part.placeholder || '';
    const name = `${part.className || part.tagName} ${text.slice(0, 20)}`;
    if (part.matches('progress') && box.width < 40) faults.push(`${name}: ${box.width} px`);
    const isCut = part.scrollWidth > part.clientWidth + 1 && !part.matches(names);
    if (isCut) faults.push(`${name}: cut`);
    for (let above = part.parentElement; panel.contains(above); above = above.parentElement) {
      const room = above.getBoundingClientRect();
      if (getComputedStyle(above).overflowX === 'visible') continue;
      if (box.left < room.left - 1 || box.right > room.right + 1
          || box.top < room.top - 1 || box.bottom > room.bottom + 1) {
        faults.push(`${name}: out of ${above.className}`);
      }
    }
    if (part.matches('span, b, th, td')) {
      const range = document.createRange();
      range.selectNodeContents(part);
      const words = range.getBoundingClientRect();
      const left = Math.max(words.left, box.left), right = Math.min(words.right, box.right);
      box = new DOMRect(left, words.top, right - left, words.height);
    }
    for (const [other, before] of shown) {
      if (Math.min(box.right, before.right) - Math.max(box.left, before.left) > 1
          && Math.min(box.bottom, before.bottom) - Math.max(box.top, before.top) > 1) {
        faults.push(`${name} over ${other}`);
      }
    }
    shown.push([name, box]);
  }
  return faults;
}"""


# On a page that is narrower still, how each rank stands.
_STATES_FIT = """() => {
  const states = [...document.querySelectorAll('td.na-c-state')];
  return document.querySelector('.na-panel').offsetWidth < 310 && states.every((state) =>
    state.offsetWidth && state.scrollWidth <= state.clientWidth);
}"""


def check_layout(notebook):
    _check_in_windows(notebook, (1200, 600, 400), _FAULTS)
    _check_in_windows(notebook, (340,), _STATES_FIT)


# Wherever the log is scrolled to, one of its first lines says whose it is.
_TAGS_STAY = """() => {
  const log = document.querySelector(".na-scroll"), top = log.getBoundingClientRect().top;
  const isHigh = ({y}) => top - 1 <= y && y < top + 56;
  const tags = [...log.querySelectorAll(".na-tag")];
  const found = [100, 250, 400, 550].map((distance) => {
    log.scrollTop = -distance;
    return tags.some((tag) => isHigh(tag.getBoundingClientRect()));
  });
  log.scrollTop = 0;
  return found;
}"""


# Whether each of its cells stands below the head of its column, and what does not fit is reached by
# scrolling: nothing is out of the page, and how each rank stands is in sight from the start.
_HAS_COLUMNS = """() => {
  const table = [...document.querySelectorAll('.jp-OutputArea-output table')].at(-1);
  const [heads, ...rows] = [...table.rows].map((row) =>
    [...row.cells].map((cell) => cell.getBoundingClientRect()));
  const box = table.parentElement, room = box.getBoundingClientRect();
  const area = table.closest('.jp-Cell-outputArea').getBoundingClientRect();
  const fits = table.offsetWidth <= box.clientWidth;
  return room.right <= area.right && area.right <= innerWidth && heads.length > 3
    && (fits || getComputedStyle(box).overflowX === 'auto') && (fits || area.width < 400)
    && heads[2].left + 90 < room.right && rows.length && rows.every((row) =>
      row.every((cell, index) => cell.top === row[0].top && cell.left === heads[index].left));
}"""


# Of its buttons; and on a narrow page, where these have several, of the controls of its charts.
_CLONE_HAS_ONE_LINE = """(width) => {
  const clone = document.querySelector('.na-below .na-panel');
  const line = clone.querySelector(width > 400 ? '.na-buttons' : '.na-metrics .na-log-bar');
  const [room, height] = width > 400 ? [560, 50] : [360, 40];
  return clone.clientWidth < room && line.clientHeight < height;
}"""


def _check_in_windows(notebook, widths, condition):
    """Check what is true in windows of some widths, or gives no faults."""
    page, before = notebook.page, notebook.page.viewport_size
    notebook.hide_sidebar()
    for width in widths:
        page.set_viewport_size({"width": width, "height": 1000})
        deadline = time.monotonic() + 30
        while (found := page.evaluate(condition, width)) not in (True, []):
            assert time.monotonic() < deadline, f"{width} px: {found}"
            page.wait_for_timeout(100)
    page.set_viewport_size(before)
