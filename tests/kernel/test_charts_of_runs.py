"""``compare()`` and ``run.plot()`` in a kernel: the panel's own charts, live while a run trains."""

import html
import re
import shutil
from base64 import b64decode

import pytest

from tests.kernel.notebooks import open_notebook

TRAIN = """
import pathlib, threading, time
from notebook_accel import Accelerator, compare, notebook_launcher, runs

def train(lr, width, end=None):
    accelerator = Accelerator()
    for step in range(10**6):
        accelerator.log({"loss": lr / (step + 1), "<b>": float("nan")}, step=step)
        if end is None and step > 8 or end is not None and pathlib.Path(end).exists():
            return
        time.sleep(0 if end is None else 0.05)

def followers():
    return sum(thread.name == "notebook-accel-charts" for thread in threading.enumerate())
"""


def images(page):
    """The SVG of each image, or of each part that is drawn anew all the time."""
    found = re.findall(r"base64,([\w+/=]+)", page)
    return [b64decode(each).decode() for each in found] or page.split("<svg height='112'")


def strokes(page):
    """The colours of the curves of each chart."""
    found = [re.findall(r"<path[^>]*stroke='(#\w+)'", image) for image in images(page)]
    return [colours for colours in found if colours]


@pytest.fixture(scope="module")
def notebook():
    with open_notebook() as notebook:
        yield notebook


def test_charts_in_a_kernel_are_the_panels_and_follow_runs_that_train(notebook, tmp_path):
    kernel = notebook.kernel
    notebook.run(TRAIN)
    notebook.run("old = notebook_launcher(train, (0.5, 8), 1)")
    end = tmp_path / "end"
    launch = f"notebook_launcher(train, (0.25, 8, {str(end)!r}), 1, block=False)"
    notebook.run(f"live = {launch}")
    output = notebook.shows("compare(old, live)")
    # It may not have logged yet.
    is_overlaid = lambda: [*map(len, strokes(output["data"]["text/html"]))] == [2]  # noqa: E731
    assert kernel.listen_until(is_overlaid, seconds=30)
    told = "'los': not logged yet; there is 'loss', '<b>'"
    assert notebook.run("print(live.plot('los'))") == f"{told}\n"
    assert told in html.unescape(notebook.run("print(live.plot('los')._repr_html_())"))
    first = output["data"]["text/html"]
    # A colour a run; what differs is in the legend, and what does not is not.
    assert strokes(first) == [["#d9730d", "#2f86d6"]]
    legend = html.unescape(first.partition("<svg")[0])
    assert "lr=0.5" in legend
    assert "lr=0.25" in legend
    assert "width=8" not in legend
    # The table calls them as the legend does.
    assert re.findall(r"<tr><td[^>]*>([\w=.]+)", first) == ["lr=0.5", "lr=0.25"]
    assert "<script" not in first
    assert first.count("<tr>") == 3
    assert ">&lt;b&gt;</b>" in first
    assert len(first) < 20_000
    assert "step" in first.partition("position:absolute")[2]

    def steps():
        text = " ".join(images(output["data"]["text/html"]))
        return max(int(step.replace(",", "")) for step in re.findall(r">step ([\d,]+)<", text))

    before, num = steps(), len(kernel.seen)
    assert kernel.listen_until(lambda: steps() > before, seconds=30), "the chart is not live"
    kernel.listen_until(lambda: False, seconds=3)
    updates = [seen.when for seen in kernel.seen[num:] if seen.kind == "update_display_data"]
    # Those of the run's own panel, and these: not more than a few times a second.
    assert 1 <= len(updates) < 5 * (3 + updates[-1] - updates[0])
    assert notebook.run("print(followers())") == "1\n"
    end.touch()
    have_ended = lambda: output["data"]["text/html"].count("✓ succeeded") == 2  # noqa: E731
    assert kernel.listen_until(have_ended, seconds=30)
    notebook.run("while followers(): time.sleep(0.01)")
    last = notebook.run("live.wait(); print(max(row['step'] for row in live.metrics))")
    assert steps() == int(last)

    text = notebook.run("print(compare(old, live, names=['loss']))").splitlines()
    assert re.match(r"loss +lr=0.5 +█▄▃", text[0])
    # One run: its values below the pointer, and no legend.
    page = notebook.shows("old.plot('loss')")["data"]["text/html"]
    assert len(strokes(page)) == 1
    assert "title='step 3: 0.125'" in page
    assert "lr=" not in page
    assert "no metric is called 'los'" in notebook.fails("old.plot('los')")
    assert "no metric is called 'los'" in notebook.fails("compare(old, names=['los'])")
    assert "backend='plotly'" in notebook.fails("old.plot(backend='plotly')")
    axes = "old.plot('loss', backend='matplotlib'), compare(old, live, backend='matplotlib')"
    # Where it builds its list of fonts for the first time, it may say so.
    assert notebook.run(f"print([len(each) for each in ({axes})])").endswith("[1, 2]\n")

    # Of many runs the best is in colour.
    launch = "notebook_launcher(train, (1 / (number + 1), 8), 1, session=True)"
    notebook.run(f"many = [{launch} for number in range(12)]")
    page = notebook.shows("compare(many, names=['loss'])")["data"]["text/html"]
    (colours,) = strokes(page)
    assert len(colours) == 2
    assert colours[0] == "#808080"
    assert "in colour: 0.0833333" in html.unescape(page.partition("<img")[0])
    assert len(page.partition("<table")[0]) < 20_000


CLONED = """
import pathlib, time, torch
from notebook_accel import Accelerator, find_run, notebook_launcher

def train(lr, end=None):
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    for step in range(10**6):
        accelerator.log({"loss": lr / (step + 1)}, step=step)
        if end is None and step == 9 or end is not None and pathlib.Path(end).exists():
            return accelerator.save_state(pathlib.Path(folder) / "kept")
        time.sleep(0 if end is None else 0.05)
"""


def check_original(notebook, launch, end, legend):
    """Check that the curve of the original is pale, live and in the summary."""
    kernel = notebook.kernel
    kernel.displays.clear()
    kernel.models.clear()
    notebook.run(f"new = {launch}")

    def charts():
        values = (str(model.get("value")) for model in kernel.models.values())
        return [value for value in values if "class='na-plot'" in value]

    is_drawn = lambda: any(chart.count("<path") == 2 for chart in charts())  # noqa: E731
    assert kernel.listen_until(is_drawn, seconds=60), charts()
    assert legend in html.unescape(charts()[0])
    assert "original 0." in charts()[0]
    end.touch()
    has_summary = lambda: any("✓ succeeded" in str(one) for one in kernel.displays.values())  # noqa: E731
    assert kernel.listen_until(has_summary, seconds=60)
    pages = [str(one["data"].get("text/html")) for one in kernel.displays.values()]
    (page,) = (page for page in pages if "✓ succeeded" in page)
    assert strokes(page) == [["#808080", "#2f86d6"]]
    assert legend in html.unescape(page)
    end.unlink()


def test_a_clone_and_a_resumed_run_show_the_curve_of_their_original(tmp_path):
    with open_notebook({"NOTEBOOK_ACCEL_RUNS": str(tmp_path / "runs")}) as notebook:
        end = tmp_path / "end"
        notebook.run(f"folder = {str(tmp_path)!r}{CLONED}")
        notebook.run("old = notebook_launcher(train, (0.5,), 1, name='first')")
        clone = f"old.clone(lr=0.25, end={str(end)!r})"
        check_original(notebook, clone, end, "pale: first (lr=0.5)")
        check_original(notebook, clone.replace(")", ", warm=True)"), end, "pale: first (lr=0.5)")
        old, origin = notebook.value("old.id, new.state.origin")
        assert old == origin
        resume = f"notebook_launcher(train, (0.5, {str(end)!r}), 1, block=False, resume=old)"
        folder = f"={str(tmp_path / 'kept')!r}"
        check_original(notebook, resume.replace("=old", folder), end, "pale: lr=0.25")
        check_original(notebook, resume, end, "pale: first")

        # In another kernel, from the disk; and once the original was deleted without it.
        page = "print(type(new.show()).__name__)"
        new = notebook.value("new.id")
        notebook.manager.restart_kernel(now=True)
        notebook.kernel.client.wait_for_ready(timeout=60)
        found = f"from notebook_accel import find_run\nnew = find_run({new!r})\n{page}"
        reply = notebook.finish(notebook.start(found))
        pages = [str(one["data"].get("text/html")) for one in reply.outputs]
        assert "pale: first" in html.unescape("".join(pages))
        shutil.rmtree(tmp_path / "runs" / old)
        reply = notebook.finish(notebook.start("new.show()"))
        assert "pale: first" not in str(reply.outputs)
        assert "✓ succeeded" in str(reply.outputs)
