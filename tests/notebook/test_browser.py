"""Runs in a real browser, on several versions of ipykernel: while a cell blocks, in the background,
and where the page or the kernel goes meanwhile.
"""

import json
import re

import nbformat
import pytest
from playwright.sync_api import expect

from notebook_accel import runs
from tests.notebook.kernels import INSTALLED, OTHERS
from tests.notebook.kernels import TRAIN as TRAIN_UNTIL
from tests.notebook.lab import open_browser, open_lab
from tests.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

VERSIONS = (INSTALLED, *OTHERS)
# Notebook 7 opens faster than JupyterLab.
APPS = dict(zip(VERSIONS, ("lab", "notebook", "notebook"), strict=True))
SETUP = """
import ipykernel
from notebook_accel import notebook_launcher
print("ipykernel", ipykernel.__version__)
"""
# It trains until it is stopped; rank 0 draws a bar for each epoch in one for all, rank 1 none.
TRAIN = """
def train():
    import time
    from torch.utils.data import DataLoader
    from tqdm.auto import tqdm
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(400), batch_size=2))
    step, quiet = 0, not accelerator.is_main_process
    for epoch in tqdm(range(1000), desc="epochs", disable=quiet):
        for _ in tqdm(loader, desc="batches", leave=False, disable=quiet):
            time.sleep(0.005)
            step += 1
            if step % 10 == 0:
                accelerator.log({"loss": 1 / step}, step=step)
            if step == 20:
                print(f"rank {accelerator.process_index} speaks <b>loudly</b>")
            if accelerator.should_stop:
                return step
"""
LAUNCH = "run = notebook_launcher(train, num_processes=2)"
LAUNCH_AND_GO_ON = LAUNCH.replace("2)", "2, block=False)")
AFTER = "print('left at', run[0] == run[1], run.status)"
# How far the bars of the live panel are, a row each.
BARS = """() => [...document.querySelectorAll('.na-ranks tbody tr')]
  .map(row => row.querySelector('progress')?.value)"""

# ipywidgets 8 looks for the model of a widget for two seconds. Where all models of a page that is
# reloaded come at once just then, it says this for good, though it has them by now.
GIVEN_UP = "Error displaying widget: model not found"
HAS_MODEL = """async (number) => {
  const cell = window.jupyterapp.shell.currentWidget.content.widgets[number];
  const id = cell.model.outputs.get(0).data['application/vnd.jupyter.widget-view+json'].model_id;
  for (const output of cell.outputArea.widgets) for (const shown of output.children())
    if (shown._manager) return (await shown._manager.promise).has_model(id);
}"""

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
FONT_OF_LINES = "() => getComputedStyle(document.querySelector('.na-blocks pre')).font"
# How many pixels of the line at the top edge of the log's box are out of sight.
CUT_OFF = """() => {
  const top = document.querySelector('.na-scroll').getBoundingClientRect().top;
  for (const lines of document.querySelectorAll('.na-blocks pre')) {
    const box = lines.getBoundingClientRect();
    const height = parseFloat(getComputedStyle(lines).lineHeight);
    if (box.top < top && box.bottom > top) return Math.round((top - box.top) % height);
  }
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with open_lab(tmp_path_factory.mktemp("lab"), VERSIONS) as lab:
        yield lab


@pytest.fixture(scope="module")
def browser(chromium):
    with open_browser(chromium) as browser:
        yield browser


@pytest.fixture(scope="module")
def notebook(lab, browser):
    """One of the installed kernel, in Notebook 7, for all tests that add their cells to it."""
    lab.write("book.ipynb", [SETUP], INSTALLED)
    notebook = lab.open(browser, "book.ipynb", app="notebook")
    notebook.wait_until_idle()
    yield notebook
    notebook.close()


def wait_for_moves(output):
    """Wait until each bar shows something else: two of rank 0, one in the other, and one of rank 1.

    Each has a row of its own, which stays when the inner bar ends and another one begins.
    """
    page = output.page
    page.wait_for_function(f"() => ({BARS})().length === 3", timeout=60_000)
    moved = f"([row, since]) => ![undefined, since].includes(({BARS})()[row])"
    for row, since in enumerate(page.evaluate(BARS)):
        page.wait_for_function(moved, arg=[row, since], timeout=30_000)


def wait_for_summary(output):
    """Wait until the summary of a run that was stopped stands in place of its panel."""
    output.get_by_text("■ stopped").first.wait_for(timeout=60_000)
    output.locator("img[alt^='loss']").wait_for(timeout=30_000)
    expect(output.locator("button:visible")).to_have_count(0)


def reload(notebook, cell):
    """Reload the page, as a person does: again, where it gave up a widget that it has."""
    output = notebook.output(cell)
    for _ in range(3):
        notebook.reload()
        output.get_by_text(GIVEN_UP).or_(output.locator(".na-ranks")).wait_for(timeout=60_000)
        if not output.get_by_text(GIVEN_UP).is_visible():
            return
        assert notebook.page.evaluate(HAS_MODEL, cell), "the page lacks the panel"


def reload_and_stop(notebook, cell):
    """The panel of a cell that blocks moves and stops in a reloaded page as before."""
    output = notebook.output(cell)
    wait_for_moves(output)
    reload(notebook, cell)
    wait_for_moves(output)
    output.get_by_role("button", name="Stop").click()
    wait_for_summary(output)
    # That page cannot save it there: the next cell has it.
    output.get_by_text("the next cell that runs puts it into the").wait_for(timeout=30_000)
    notebook.add("1;").get_by_text("■ stopped").first.wait_for(timeout=60_000)
    notebook.close()


# Another ipykernel has an environment of its own, and `make test-kernels` has more of them.
@pytest.mark.parametrize(
    "version", [INSTALLED, *(pytest.param(other, marks=pytest.mark.long) for other in OTHERS)]
)
def test_a_blocked_cell_shows_its_ranks_live_and_stops_by_mouse_also_in_a_page_that_is_reloaded(
    lab, browser, version
):
    lab.write(f"{version}.ipynb", [SETUP, TRAIN, LAUNCH, AFTER], version)
    notebook = lab.open(browser, f"{version}.ipynb", app=APPS[version])
    notebook.wait_until_idle()
    notebook.run_all()
    output = notebook.output(2)
    # All bars move while the cell blocks, and each rank's lines are there, as text.
    wait_for_moves(output)
    for rank in (0, 1):
        output.get_by_text(f"rank {rank} speaks <b>loudly</b>").wait_for(timeout=30_000)
    if version != INSTALLED:
        expect(notebook.output(0)).to_contain_text(f"ipykernel {version}")

    # The filter works meanwhile.
    output.get_by_label("Output of").select_option(label="rank 1")
    output.get_by_text("rank 0 speaks").wait_for(state="detached", timeout=30_000)
    output.get_by_text("rank 1 speaks").wait_for(timeout=30_000)

    assert "[*]" in notebook.prompt(2)
    output.get_by_role("button", name="Stop").click()
    notebook.output(3).get_by_text("left at True stopped").wait_for(timeout=60_000)

    # The panel has given way to the summary, and so it is saved.
    wait_for_summary(output)
    notebook.save()
    saved = json.loads((lab.folder / f"{version}.ipynb").read_text())
    shown, *below = saved["cells"][2]["outputs"]
    assert sorted(shown["data"]) == ["text/html", "text/plain"]
    # Of what stands below the panel of a run that lasts, nothing is left.
    assert not any(text for output in below for text in output["data"].values())

    # The panel that is reloaded moves and stops as well, and shows the summary in its own place.
    notebook.run(2)
    reload_and_stop(notebook, 2)


@pytest.mark.long
def test_a_page_that_was_told_no_states_in_time_asks_each_widget_for_its_own(lab, browser):
    """As after four seconds of a busy machine; the cell blocks the kernel meanwhile."""
    silent = "import ipywidgets\nipywidgets.Widget._handle_control_comm_msg = lambda _: None"
    lab.write("late.ipynb", [f"{SETUP}{silent}", TRAIN, LAUNCH], INSTALLED)
    notebook = lab.open(browser, "late.ipynb", app="lab")
    notebook.wait_until_idle()
    notebook.run_all()
    reload_and_stop(notebook, 2)


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


def test_the_log_follows_until_somebody_scrolls_up_and_again_by_a_button(notebook, tmp_path):
    notebook.add(f"{SETUP}{SPEAK}")
    launch = f"run = notebook_launcher(speak, ({str(tmp_path)!r}, 1900), num_processes=1)"
    output, page = notebook.add(launch), notebook.page

    def add(part):
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
    page.wait_for_function(IN_SIGHT, arg="part 1", timeout=30_000)
    # The line at the top is whole.
    page.wait_for_function(f"() => !({CUT_OFF})()", timeout=30_000)
    before = page.evaluate(FONT_OF_LINES)
    for theme in ("dark", "light"):
        notebook.set_theme(theme)
        assert page.evaluate(FONT_OF_LINES) == before

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
    expect(output.get_by_text("part 5").first).to_be_visible()


def test_a_run_in_the_background_stops_by_mouse_also_while_another_cell_computes(notebook):
    notebook.add(f"{SETUP}{TRAIN}")
    output = notebook.add(LAUNCH_AND_GO_ON)
    wait_for_moves(output)
    notebook.wait_until_idle()
    output.get_by_role("button", name="Stop").click()
    wait_for_summary(output)

    output = notebook.add(LAUNCH_AND_GO_ON)
    wait_for_moves(output)
    other = notebook.add("import time\nprint('computes', flush=True)\ntime.sleep(600)")
    other.get_by_text("computes").wait_for(timeout=30_000)
    output.get_by_role("button", name="Stop").click()
    wait_for_summary(output)
    # It takes no other cell with it; that one ends by the page's own Interrupt.
    assert "Error" not in other.inner_text()
    notebook.interrupt()
    other.get_by_text("KeyboardInterrupt").first.wait_for(timeout=30_000)


@pytest.mark.long
def test_a_run_that_ends_while_its_page_is_closed_and_what_is_seen_without_its_kernel(
    notebook, lab, browser, tmp_path
):
    end = tmp_path / "end"
    notebook.add(f"{SETUP}{TRAIN_UNTIL}")
    end.touch()
    launch = f"run = notebook_launcher(train_until, ({str(end)!r}, 50), num_processes=2, name="
    first = notebook.insert(f"{launch}'first')")
    notebook.run(first)
    notebook.output(first).get_by_text("✓ succeeded").first.wait_for(timeout=60_000)
    end.unlink()
    second = notebook.insert(f"{launch}'second', block=False)")
    notebook.run(second)
    output = notebook.output(second)
    output.get_by_text("done on 1").wait_for(timeout=60_000)
    with notebook.closed():
        copy = nbformat.read(lab.folder / "book.ipynb", as_version=4)
        end.touch()
        has_ended = lambda: runs(everywhere=True)[-1].status == "succeeded"  # noqa: E731
        eventually(has_ended, within=60, what="the run ended")
    # The kernel has the summary for the page that comes back, where a cell can take it over.
    check_summary(output, "second")
    output.get_by_text(".show() in a cell puts it into the notebook").wait_for(timeout=30_000)

    # Elsewhere there is no kernel, and nobody trusts the file.
    copy.metadata["kernelspec"] = {"name": "gone", "display_name": "gone"}
    copy.cells = [copy.cells[first], copy.cells[second]]
    nbformat.write(copy, lab.folder / "elsewhere.ipynb")
    elsewhere = lab.open(browser, "elsewhere.ipynb", app="notebook")
    elsewhere.choose_no_kernel()
    assert not elsewhere.is_trusted()
    check_summary(elsewhere.output(0), "first")
    said = f"find_run({runs(everywhere=True)[-1].id!r}).show() draws it again"
    elsewhere.output(1).get_by_text(said).wait_for(timeout=30_000)
    elsewhere.page.close()


# What a person reads who holds the mouse still over the middle of a chart.
BELOW_POINTER = """image => {
    const {x, y, width} = image.getBoundingClientRect();
    return document.elementFromPoint(x + width / 2, y + 40).title;
}"""


def check_summary(output, name):
    """Check what a page shows of such a run that has ended."""
    output.get_by_text("✓ succeeded").first.wait_for(timeout=30_000)
    expect(output.get_by_text(name, exact=True)).to_have_count(1)
    expect(output.locator("td").filter(has_text="succeeded")).to_have_count(2)
    image = output.locator("img[alt^='loss']")
    is_drawn = "image => image.complete && image.naturalWidth > 0"
    output.page.wait_for_function(is_drawn, arg=image.element_handle(), timeout=30_000)
    image.scroll_into_view_if_needed()
    assert re.match(r"step \d+: \d", image.evaluate(BELOW_POINTER))
    output.get_by_text("done on 0").wait_for(timeout=30_000)


@pytest.mark.long
def test_after_a_restart_in_mid_run_the_panel_looks_dead_and_says_what_to_type(notebook):
    notebook.add(f"{SETUP}{TRAIN}")
    output = notebook.add(LAUNCH_AND_GO_ON)
    output.get_by_text("rank 0 speaks").wait_for(timeout=60_000)
    shown_again = notebook.add("run.show()")
    shown_again.get_by_text("rank 0 speaks").wait_for(timeout=30_000)
    notebook.restart()
    notebook.page.wait_for_function(
        "() => document.querySelector('.na-panel .na-gone').checkVisibility()", timeout=30_000
    )
    gone = output.locator(".na-gone")
    said = r"is gone\. .* import notebook_accel; notebook_accel\.find_run\('\S+'\)\.show\(\)"
    expect(gone).to_have_text(re.compile(said))
    # Which run that was stands above it, in a line of its own.
    name, text = output.locator(".na-title b").bounding_box(), gone.bounding_box()
    assert name["width"] >= 30
    assert name["y"] + name["height"] <= text["y"]
    for what in (".jupyter-button", "select", ".na-dot", ".na-status", "td.na-c-state"):
        expect(output.locator(what).first).to_be_hidden()
    # The summaries of runs that ended are as they were.
    assert notebook.count_broken_links() == 0
    # A server shuts down no kernel that is being restarted.
    notebook.wait_until_idle()
