"""What a person relies on in each line of ipykernel: ``make test-kernels``.

A cell that blocks, one in the background, Stop while the cell blocks, Interrupt, where output
lands, and the order of queued cells; in real kernels, driven by the protocol as a page drives them.
Not collected by `make test`, which tries the installed kernel in the browser; `make test-long`
tries two others there.
"""

import textwrap

import pytest

from tests.notebook import test_kernel
from tests.notebook.kernels import MATRIX, open_kernel

SETUP = (
    test_kernel.SETUP
    + """
import ipykernel, pathlib
def until_stopped(ready):
    import pathlib, time
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    pathlib.Path(ready).touch()
    while not accelerator.should_stop:
        time.sleep(0.01)
    return "left"
def until_there(file):
    import pathlib, time
    print("waiting on a rank", flush=True)
    while not pathlib.Path(file).exists():
        time.sleep(0.01)
    print("seen on a rank", flush=True)
"""
)
# Of the tests of the installed kernel, these hold in each.
test_a_cell_that_blocks = test_kernel.test_the_live_panel_gives_way_to_a_summary_that_is_sent_again
test_an_interrupt = test_kernel.test_an_interrupt_is_told_in_few_lines


@pytest.fixture(scope="module", params=MATRIX)
def kernel(request):
    with open_kernel(request.param) as kernel:
        assert kernel.run(SETUP, timeout=120).status == "ok"
        assert kernel.run("print(ipykernel.__version__)").text == f"{request.param}\n"
        # The first launch of a kernel shows that it starts before there is a panel.
        kernel.run("notebook_launcher(train, (2,), num_processes=1)", timeout=120)
        yield kernel


def run(kernel, code):
    reply = kernel.run(textwrap.dedent(code), timeout=100)
    assert reply.status == "ok", "\n".join(reply.traceback)
    return reply


def test_a_background_run_leaves_the_notebook_free_and_its_output_where_it_was_started(
    kernel, tmp_path
):
    seen = tmp_path / "seen"
    launch = "run = notebook_launcher(until_there, ({!r},), num_processes=2, block=False)"
    run(kernel, launch.format(str(seen)))
    other = run(kernel, "print(6 * 7, run.status in ('starting', 'running'))")
    assert (other.text, other.outputs) == ("42 True\n", [])
    seen.touch()
    waited = run(kernel, "run.wait(); print(run.results)")
    # What the ranks printed is in the panel of the first cell, and in no other cell's output.
    assert "rank" not in waited.text.replace("[None, None]", "")
    logs = run(kernel, "print(run.logs(1))").text
    assert logs.split("\n")[:2] == ["waiting on a rank", "seen on a rank"]
    kernel.listen_until(lambda: "succeeded" in shown_last(kernel), seconds=20)
    assert "seen on a rank" in shown_last(kernel)


def shown_last(kernel):
    """What the last displays of the kernel hold now, as HTML: a panel, and what is below it."""
    last = list(kernel.displays.values())[-2:]
    return "".join(display["data"].get("text/html", "") for display in last)


@pytest.mark.parametrize("by_subshell", [True, False])
def test_stop_ends_a_blocked_cell_and_queued_cells_run_in_order(kernel, tmp_path, by_subshell):
    ready, order = tmp_path / "ready", tmp_path / "order"
    kernel.displays.clear()
    launch = "run = notebook_launcher(until_stopped, ({!r},), num_processes=2)"
    kernel.seen.clear()
    cell = kernel.start(launch.format(str(ready)))
    # As a page that is reloaded before there is anything that waits.
    begun = lambda: "execute_input" in {message.kind for message in kernel.seen}  # noqa: E731
    assert kernel.listen_until(begun, seconds=30)
    early = kernel.client.kernel_info()
    queued = [
        kernel.start(
            f"_ = pathlib.Path({str(order)!r}).open('a').write('{name} ' + run.status + '\\n')"
        )
        for name in ("first", "second")
    ]
    assert kernel.listen_until(ready.exists, seconds=60)
    kernel.wait_for_panel(seconds=30)
    # ipykernel 7 has put what came before the cell waited into its own queue.
    assert kernel.has_subshells or kernel.answers(early, seconds=10)
    assert kernel.answers_new_page(seconds=10)
    kernel.click("Stop", by_subshell=by_subshell)
    reply = kernel.finish(cell, timeout=60)
    assert reply.status == "ok", "\n".join(reply.traceback)
    for message_id in queued:
        kernel.finish(message_id)
    assert order.read_text() == "first stopped\nsecond stopped\n"
    assert run(kernel, "print(run.results)").text == "['left', 'left']\n"


def test_stop_ends_a_cell_in_the_background_that_another_one_waits_for(kernel, tmp_path):
    ready = tmp_path / "ready"
    kernel.displays.clear()
    run(kernel, f"%%accelerate -n 2 --bg --push until_stopped\nuntil_stopped({str(ready)!r})")
    waiting = kernel.start("%%accelerate\nrank + 40")
    assert kernel.listen_until(ready.exists, seconds=60)
    kernel.wait_for_panel(seconds=30)
    kernel.click("Stop")
    reply = kernel.finish(waiting, timeout=60)
    assert "41" in reply.text + str(reply.outputs)


@pytest.fixture(scope="module")
def colab():
    """A kernel with Colab's pins, which takes itself for Colab's."""
    with open_kernel(MATRIX[0]) as kernel:
        name = "{'__module__': 'google.colab._shell'}"
        run(kernel, f"get_ipython().__class__ = type('Shell', (type(get_ipython()),), {name})")
        run(kernel, SETUP)
        run(kernel, "notebook_launcher(train, (2,), num_processes=1)")
        yield kernel


def test_in_colab_a_page_that_draws_only_running_cells_misses_nothing(colab, tmp_path):
    _, html = colab.train_with_panel(tmp_path, timeout=100)
    assert "succeeded" in html

    # In the background: nothing is drawn until a cell waits for it, and all in that cell then.
    ready = tmp_path / "ready"
    launch = "run = notebook_launcher({}, ({!r},), num_processes=2, block=False)"
    line = run(colab, launch.format("until_stopped", str(ready))).outputs[0]["data"]["text/plain"]
    assert "runs in the background" in line
    assert ".wait() in a cell shows it live" in line
    colab.displays.clear()
    assert colab.listen_until(ready.exists, seconds=60)
    waiting = colab.start("run.wait()")
    colab.wait_for_panel(seconds=30)
    colab.click("Stop")
    colab.finish(waiting, timeout=60)
    assert "stopped" in shown_last(colab)

    # One that has ended meanwhile stands in the cell that asks for it.
    there = tmp_path / "there"
    there.touch()
    run(colab, launch.format("until_there", str(there)))
    run(colab, "from notebook_accel.launch.run import call_of\ncall_of(run).ended.wait(60)")
    waited = run(colab, "run.wait()")
    assert "succeeded" in waited.outputs[0]["data"]["text/html"]
    assert "seen on a rank" in waited.outputs[0]["data"]["text/html"]
    # A summary that nobody waited for is drawn by the next cell that asks.
    assert {*colab.strays} <= {"update_display_data"}


def test_in_colab_the_form_waits_for_no_message_between_cells(colab):
    run(colab, FORM)
    assert any("CPU cores" in text for text in colab.widgets)
    colab.fill("Function", "train")
    colab.fill("Arguments", "steps=5")
    has_code = lambda: any("kwargs=dict(steps=5)" in text for text in colab.widgets)  # noqa: E731
    assert colab.listen_until(has_code, seconds=30)
    colab.click("Launch")
    launch_button = colab.models[colab.buttons["Launch"]]
    begun = lambda: launch_button.get("description") == "Running"  # noqa: E731
    assert colab.listen_until(begun, seconds=60)
    # Once it has ended, the next cell tells the button.
    told = """
        import threading
        ended = threading.Event()
        picker.run.add_done_callback(lambda _: ended.set())  # called after the form's own
        assert ended.wait(60)
    """
    run(colab, textwrap.dedent(told))
    launch_button["description"] = "as the page has it"
    run(colab, "pass")
    assert launch_button["description"] == "Launch"


FORM = """
from notebook_accel import config_picker
picker = config_picker({"num_processes": 2})
picker
"""


def test_the_form_is_drawn_and_launches_a_training(kernel, tmp_path):
    kernel.displays.clear()
    cell = run(kernel, FORM)
    assert kernel.shows_panel
    # What is known of the machine comes from a thread.
    has_looked = lambda: any("GB of it free" in text for text in kernel.widgets)  # noqa: E731
    assert kernel.listen_until(has_looked, seconds=60)
    # What a person chooses and types comes as the new value of a widget.
    kernel.fill("Function", "train")
    kernel.fill("Arguments", "steps=5")
    kernel.fill("Seed", "7")
    has_code = lambda: any("kwargs=dict(steps=5)" in text for text in kernel.widgets)  # noqa: E731
    assert kernel.listen_until(has_code, seconds=30)
    kernel.click("Launch")
    ended = lambda: "succeeded" in shown_last(kernel)  # noqa: E731
    assert kernel.listen_until(ended, seconds=60)
    assert "succeeded" in cell.outputs[1]["data"]["text/html"], "it stands below the form"
    assert run(kernel, "print(picker.config.seed, picker.run.results)").text == "7 [0, 1]\n"
    run(kernel, f"picker.run.export({str(tmp_path / 'train.py')!r})")
    assert "train(steps=5)" in (tmp_path / "train.py").read_text()

    run(kernel, "def fails(): raise ValueError('bad batch')")
    kernel.fill("Function", "fails")
    kernel.fill("Arguments", "")
    kernel.click("Launch")
    failed = lambda: "bad batch" in shown_last(kernel)  # noqa: E731
    assert kernel.listen_until(failed, seconds=60)


def test_no_request_is_left_unread(kernel):
    """What a page sends while the kernel replies; ipykernel 7.0 to 7.3 stopped reading then."""
    run(kernel, "import ipywidgets\ntext = ipywidgets.Text(description='Any text')\ntext")
    for number in range(300):
        for part in range(3):
            kernel.fill("Any text", f"{number}, {part}")
        assert run(kernel, "print(1)").text == "1\n"


def test_only_jupyters_own_widgets_draw_it(kernel):
    """Colab has no others, unless a page loads them from elsewhere."""
    modules = {model.get("_view_module") for model in kernel.models.values()}
    assert modules - {None} == {"@jupyter-widgets/base", "@jupyter-widgets/controls"}


def test_the_cell_magic_runs_on_every_rank(kernel):
    reply = run(kernel, "%%accelerate -n 2\nrank + 40, world_size")
    assert "(40, 2)" in reply.text + str(reply.outputs)
    assert "(41, 2)" in reply.text + str(reply.outputs)
