"""The view in a real kernel, driven as a page drives it."""

import re
import textwrap
from html import unescape

import nbclient
import nbformat
import pytest
from jupyter_client.session import Session

from tests.notebook.kernels import TRAIN, AsyncManager, Console, VSCode, open_kernel

SETUP = (
    """
%load_ext notebook_accel
from notebook_accel import find_run, notebook_launcher, runs
def fail():
    raise ValueError("bad batch")
def draw():
    import os
    from IPython.display import HTML, display
    import matplotlib.pyplot as plt
    plt.plot([1, 2])
    plt.show()
    display(HTML("<i>from " + os.environ["RANK"] + "</i>"))
    handle = display(HTML("<u>old</u>"), display_id=True)
    handle.update(HTML("<u>new</u>"))
def train_and_draw(steps):
    draw()
    return train(steps)
"""
    + TRAIN
)


@pytest.fixture(scope="module")
def kernel():
    with open_kernel() as kernel:
        assert kernel.run(SETUP).status == "ok"
        yield kernel


# As a restart does, which leaves what is on disk.
FORGET = "from notebook_accel.launch import run_list; run_list._known.clear()"


def run(kernel, code, *, allow_stdin=True):
    return kernel.run(textwrap.dedent(code), allow_stdin=allow_stdin)


def summaries(kernel):
    return [one["data"].get("text/html", "") for one in kernel.displays.values()]


def test_a_launch_that_fails_does_not_say_for_ever_that_it_starts(kernel):
    run(kernel, "import os; runs_folder = os.environ['NOTEBOOK_ACCEL_RUNS']")
    run(kernel, "os.environ['NOTEBOOK_ACCEL_RUNS'] = '/dev/null/no'")
    # The template may be ready by now.
    run(kernel, "from notebook_accel.launch.template import handle; handle.close()")
    kernel.first.clear()
    reply = run(kernel, "notebook_launcher(train, (2,), num_processes=1)")
    # The first launch of a kernel says at once that something happens.
    (shown,) = kernel.first
    assert shown["text/plain"].startswith(
        "train: starting, which takes some seconds the first time"
    )
    assert reply.outputs[0]["data"]["text/plain"] == "train: not started"
    run(kernel, "os.environ['NOTEBOOK_ACCEL_RUNS'] = runs_folder")


def test_the_live_panel_gives_way_to_a_summary_that_is_sent_again(kernel, tmp_path):
    count = "import comm; print(len(comm.get_comm_manager().comms))"
    before = int(run(kernel, count).text)
    kernel.updates.clear()
    reply, html = kernel.train_with_panel(tmp_path)
    for words in ("succeeded", "train: 20/20", "data:image/svg+xml", "done on 0", "done on 1"):
        assert words in html
    assert (reply.text, reply.outputs) == ("", [])
    was_sent = lambda: [one.get("text/html") for one in kernel.updates].count(html) >= 2  # noqa: E731
    assert kernel.listen_until(was_sent, seconds=60)
    # Widgets do not pile up: of a run that has ended there are the box, its summary, a note, the
    # button by which a page asks for the summary, and their looks.
    assert int(run(kernel, count).text) - before <= 7
    assert run(kernel, "print(run.results)").text == "[0, 1]\n"


def test_a_run_of_an_earlier_kernel_is_drawn(kernel):
    run(kernel, "run = notebook_launcher(train_and_draw, (2,), num_processes=2)")
    run(kernel, FORGET)
    shown = run(kernel, "run = find_run(run.id); run.show()")
    assert shown.text == ""
    summary, *displayed = (output["data"] for output in shown.outputs)
    for words in ("succeeded", "alt='loss", "done on 1"):
        assert words in summary["text/html"]
    of_rank_0 = [data.get("text/html") for data in displayed]
    assert {"<i>from 0</i>", "<u>new</u>"} <= {*of_rank_0}
    assert "<u>old</u>" not in of_rank_0
    run(kernel, "[found] = [one for one in runs(everywhere=True) if one.id == run.id]")
    displayed = [output["data"] for output in run(kernel, "found.show(1)").outputs]
    assert "<i>from 1</i>" in [data.get("text/html") for data in displayed]


def test_an_error_is_the_ranks_traceback_and_no_frame_of_ours(kernel):
    reply = run(kernel, "notebook_launcher(fail, num_processes=2)")
    text = "\n".join(reply.traceback)
    assert re.search("rank [01] failed:\n(.*\n)+ValueError: bad batch\n", text)
    assert re.search(r"Cell In\[1\], line \d+, in fail", text)
    assert 'raise ValueError("bad batch")' in text
    assert "notebook_accel/launch" not in text
    assert "run_code" not in text
    # The page has the lines of the traceback once with the summary, folded, and once as the error.
    (summary,) = [output["data"]["text/html"] for output in reply.outputs]
    for shown in (text, unescape(summary)):
        assert shown.count('raise ValueError("bad batch")') == 1
    # One that no rank has is the person's own lines, too.
    reply = run(kernel, "def launch_it(): notebook_launcher(fail, num_processes=-1)\nlaunch_it()")
    text = "\n".join(reply.traceback)
    assert "notebook_launcher(fail, num_processes=-1)" in text
    assert "num_processes=-1: expected" in text
    assert "notebook_accel/launch" not in text


def test_an_error_keeps_its_traceback_for_the_debugger(kernel):
    run(kernel, "1 / 0")
    run(kernel, "notebook_launcher(fail, num_processes=1)")
    last = "type(sys.last_value).__name__, sys.last_traceback.tb_next is not None"
    assert run(kernel, f"import sys\nprint({last})").text == "WorkerError True\n"
    # The debugger opens the cell's own frame, and the error says which one knows the ranks'.
    reply = run(
        kernel, "def launch_it():\n    notebook_launcher(fail, num_processes=1)\nlaunch_it()"
    )
    assert "`%accelerate debug`" in reply.traceback[-1]
    opened = "tb = get_ipython().InteractiveTB.tb.tb_next\n"
    names = (
        "print(tb.tb_frame.f_code.co_name, tb.tb_next.tb_frame.f_code.co_name, tb.tb_next.tb_next)"
    )
    assert run(kernel, opened + names).text == "<module> launch_it None\n"
    # Inline, that is where the function stands.
    run(kernel, "notebook_launcher(fail, engine='inline')")
    innermost = "end = sys.last_traceback\nwhile end.tb_next: end = end.tb_next\n"
    assert run(kernel, innermost + "print(end.tb_frame.f_code.co_name)").text == "fail\n"
    assert run(kernel, "print(get_ipython().InteractiveTB.tb)").text == "None\n"
    shown = run(kernel, "print(runs()[-1].state.error)").text
    assert re.search(r"Cell In\[1\], line \d+, in fail", shown)
    assert "/ipykernel_" not in shown


def test_an_interrupt_is_told_in_few_lines(kernel, tmp_path):
    ready = tmp_path / "ready"
    cell = kernel.start(
        f"""
def wait():
    import pathlib, time, torch
    from notebook_accel import Accelerator
    model = Accelerator().prepare(torch.nn.Linear(1, 1))
    torch.nn.init.constant_(model.weight, 7.0)
    pathlib.Path({str(ready)!r}).touch()
    time.sleep(600)
notebook_launcher(wait, num_processes=1)
"""
    )
    assert kernel.listen_until(ready.exists, seconds=60)
    kernel.manager.interrupt_kernel()
    reply = kernel.finish(cell)
    (line,) = reply.traceback
    assert "KeyboardInterrupt" in line
    assert line.endswith(": the run was interrupted")
    # The summary alone says in short what to type, and its button copies what is true for ever.
    kept = (page for page in summaries(kernel) if ">wait<" in page and "is kept" in page)
    (shown,) = kept
    assert shown.count("what was being trained is kept: last_run().rescued<") == 1
    (code,) = re.findall(r"data-code='([^']*)'", shown)
    by_id = unescape(code).replace("import notebook_accel; ", "import notebook_accel; print(")
    typed = "from notebook_accel import last_run; print(last_run().rescued.models[0].weight.item())"
    assert run(kernel, typed).text == "7.0\n"
    assert run(kernel, f"{by_id}.models[0].weight.item())").text == "7.0\n"
    # After a restart, too.
    run(kernel, FORGET)
    assert run(kernel, f"{by_id}.weights[0]['weight'].item())").text == "7.0\n"
    error = "\n".join(run(kernel, "notebook_accel.last_run()").traceback)
    assert "this process has launched no run yet" in error


def test_what_a_page_does_with_the_form_is_done_in_its_order_also_while_a_cell_computes(
    kernel, tmp_path
):
    """A Save that came before the name that was typed would write to another file."""
    before = len(kernel.seen)
    run(kernel, "from notebook_accel import config_picker\npicker = config_picker({})\npicker")
    told = [seen.kind for seen in kernel.seen[before:] if seen.kind.startswith("comm_")]
    assert len(told) < 250, "a kernel keeps 1,000 messages for who reads slowly, and loses others"
    file, go_on = tmp_path / "picked.yaml", tmp_path / "go on"
    cell = kernel.start(f"import os\nwhile not os.path.exists({str(go_on)!r}): pass")
    for number in range(5):
        kernel.fill("Seed", str(number))
        kernel.fill("File", f"{file}{number}")
        kernel.click("Save")
        saved = f"Saved to {file}{number}"
        is_saved = lambda: any(saved in text for text in kernel.widgets)  # noqa: B023, E731
        assert kernel.listen_until(is_saved, seconds=30)
        assert f"seed: {number}" in file.with_name(f"{file.name}{number}").read_text()
    go_on.touch()
    kernel.finish(cell)


def test_the_notebook_stays_free_and_the_page_is_not_flooded(kernel, tmp_path):
    """Two ranks print as fast as they can until another cell has answered."""
    answered = tmp_path / "answered"
    run(
        kernel,
        f"""
        def flood():
            import pathlib
            number = 0
            while number < 100_000 or not pathlib.Path({str(answered)!r}).exists():
                for number in range(number, number + 1000):
                    print("line", number, "x" * 60)
                number += 1
            return number
        """,
    )
    run(kernel, "run = notebook_launcher(flood, num_processes=2, block=False)")
    # First the widgets of the log are made.
    for _ in range(2):
        kernel.seen.clear()
        kernel.listen_until(lambda: _span(kernel.seen) > 2.0, seconds=30)
    seen = list(kernel.seen)
    assert run(kernel, "1 + 1").outputs[0]["data"]["text/plain"] == "2"
    assert run(kernel, "print(run.status)").text in ("starting\n", "running\n")
    answered.touch()
    reply = run(
        kernel,
        """
        for rank, lines in enumerate(run):
            numbers = [int(line.split()[1]) for line in run.logs(rank).splitlines()]
            print(lines >= 100_000, numbers == list(range(lines)))
        """,
    )
    assert reply.text == "True True\nTrue True\n"
    assert len(seen) / _span(seen) < 20
    assert sum(message.size for message in seen) / _span(seen) < 1_000_000
    assert max(message.size for message in seen) < 20_000


def _span(seen):
    return seen[-1].when - seen[0].when if seen else 0.0


def test_an_executed_notebook_holds_the_summary_once(tmp_path):
    """By nbclient, as papermill executes it, too."""
    cells = [
        SETUP,
        "run = notebook_launcher(train, (20,), num_processes=2)",
        "run = notebook_launcher(train_and_draw, (20,), num_processes=1, block=False)",
        "run.wait(); print(run.results)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    resources = {"metadata": {"path": tmp_path}}
    manager = {"kernel_manager_class": AsyncManager}
    nbclient.NotebookClient(notebook, timeout=60, resources=resources, **manager).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    for cell in (1, 2):
        (summary,) = [output for output in outputs[cell] if output.output_type == "display_data"]
        assert "succeeded" in summary["data"]["text/html"]
        assert "data:image/svg+xml" in summary["data"]["text/html"]
        assert "widget" not in str(summary["data"].keys())
    printed = "".join(output.get("text", "") for output in outputs[1])
    assert "[rank 1] done on 1\n" in printed
    # Of a run in the background the first cell has all, once; the one that waits has no part of it.
    (background,) = outputs[2]
    for words in ("data:image/png", "<i>from 0</i>", "done on 0"):
        assert background["data"]["text/html"].count(words) == 1
        assert words not in str(outputs[3])
    assert outputs[3][-1]["text"].endswith("[0]\n")


def test_a_frontend_that_draws_no_updates_prints_lines_and_then_the_summary():
    with open_kernel(page=Console, session=Session) as kernel:
        run(kernel, TRAIN)
        run(kernel, "from notebook_accel import notebook_launcher")
        reply = run(kernel, "run = notebook_launcher(train, (20,), num_processes=2)")
        assert "[rank 1] done on 1\n" in reply.text
        assert "succeeded" in reply.outputs[-1]["data"]["text/plain"]
        # In the background, lines and summary are in the cell that waits.
        run(kernel, "run = notebook_launcher(train, (20,), num_processes=2, block=False)")
        for shown in (1, 0):
            reply = run(kernel, "run.wait();")
            assert reply.text.count("[rank 1] done on 1\n") == shown
            summaries = [str(output["data"]) for output in reply.outputs]
            assert sum("✓ succeeded" in text for text in summaries) == shown


def test_an_interrupt_or_a_reload_while_the_first_launch_says_starting(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_ACCEL_WARM", "0")
    go_on, may_start = tmp_path / "go on", tmp_path / "may start"
    launch = f"run = notebook_launcher(train_until, ({str(go_on)!r}, 20), num_processes=2)"
    with open_kernel() as kernel:
        run(kernel, TRAIN)
        run(kernel, "from notebook_accel import notebook_launcher")
        # Until then, however late the page comes to what it does.
        waits = f"import os, time\nwhile not os.path.exists({str(may_start)!r}): time.sleep(0.01)\n"
        run(kernel, "from notebook_accel.launch.template import handle")
        run(kernel, f"handle._BOOT = {waits!r} + handle._BOOT")
        cell = kernel.start(launch)
        kernel.wait_for_panel()
        kernel.manager.interrupt_kernel()
        reply = kernel.finish(cell)
        (line,) = reply.traceback
        assert line.endswith("KeyboardInterrupt\x1b[0m: interrupted before a run began")
        (shown,) = kernel.displays.values()
        assert "not started" in shown["data"]["text/plain"]

        run(kernel, "handle.close()")
        kernel.displays.clear()
        cell = kernel.start(launch)
        kernel.wait_for_panel()
        (shown,) = kernel.displays.values()
        assert "starting" in shown["data"]["text/plain"]
        box = shown["data"]["application/vnd.jupyter.widget-view+json"]["model_id"]
        kernel.reload()
        assert box in kernel.models
        assert "starting" in str(kernel.models)
        may_start.touch()
        # The widget that the page has becomes the panel, with its buttons, and then the summary.
        has_panel = lambda: len(kernel.models[box]["children"]) > 3  # noqa: E731
        assert kernel.listen_until(has_panel, seconds=60)
        assert "Stop" in kernel.buttons
        go_on.touch()
        kernel.finish(cell)
        assert "succeeded" in str(kernel.models)
        # The reloaded page gets nothing of that cell: the next one has the summary, once.
        for shown_here in (1, 0):
            outputs = [str(output["data"]) for output in run(kernel, "1;").outputs]
            assert sum("succeeded" in text for text in outputs) == shown_here


def test_hidden_requests_of_vs_code_hide_no_panel_and_no_summary(tmp_path):
    with open_kernel(page=VSCode) as kernel:
        run(kernel, TRAIN)
        run(kernel, "from notebook_accel import notebook_launcher")
        go_on = tmp_path / "go on"
        call = f"train_until, ({str(go_on)!r}, 20), num_processes=2, block=False"
        run(kernel, f"run = notebook_launcher({call})")
        kernel.ask_hidden()
        kernel.wait_for_panel(seconds=60)
        kernel.ask_hidden()
        go_on.touch()
        (shown,) = kernel.displays.values()
        is_over = lambda: "succeeded" in shown["data"].get("text/html", "")  # noqa: E731
        assert kernel.listen_until(is_over, seconds=60)
