"""What a rank displays reaches the notebook as data by MIME type."""

import base64
import os
import re

from notebook_accel import notebook_launcher
from notebook_accel.launch.run import call_of
from notebook_accel.launch.worker.displays import mime_bundle


def test_what_a_repr_raises_is_printed(capsys):
    class Broken:
        def __repr__(self):
            raise ValueError("not set up")

    assert mime_bundle(Broken()) == {}
    assert "ValueError: not set up" in capsys.readouterr().err


def draw_live():
    from IPython.display import HTML, clear_output, update_display
    from IPython.display import display as of_ipython

    clear_output()
    print("start")
    for epoch in range(30):
        clear_output(wait=True)
        of_ipython(HTML(f"<i>{epoch}</i>"))
        of_ipython(HTML("<i>second</i>"), display_id="second")
        update_display(HTML(f"<i>second {epoch}</i>"), display_id="second")
    clear_output(wait=True)


def test_clear_output_clears_what_a_rank_displayed():
    run = notebook_launcher(draw_live, num_processes=1, view="none")
    found = [one.data["text/html"] for one in run.state.ranks[0].displays]
    # In a notebook too, what nothing follows is not cleared by wait=True.
    assert found == ["<i>29</i>", "<i>second 29</i>"]
    assert run.logs(0) == "start\n"


def draw():
    import matplotlib.pyplot as plt
    from IPython.display import HTML, Markdown, update_display

    plt.plot([1, 2, 3])
    plt.show()
    from IPython.display import display as of_ipython

    of_ipython(HTML("<i>html</i>"), Markdown("**md**"))
    of_ipython(3)
    display("plain")  # noqa: F821
    of_ipython(HTML("x" * 3_000_000))
    of_ipython({"image/png": b"png", "application/json": {"a": 1}, "text/plain": "x"}, raw=True)
    handle = of_ipython(HTML("<i>first</i>"), display_id=True)
    # A place that is filled later, and text, which is not printed where it may be replaced.
    place = display(display_id="place")  # noqa: F821
    of_ipython("step 1", display_id="text")
    update_display("step 2", display_id="text")
    place.update(HTML("<i>filled</i>"))
    for number in range(100):
        handle.update(HTML(f"<i>{number}</i>"))
    return [f"{type(one).__module__}.{type(one).__name__}" for one in (handle, place)]


def test_figures_and_rich_values_are_sent_and_text_is_printed():
    run = notebook_launcher(draw, num_processes=1, view="none")
    found = run.state.ranks[0].displays
    figure, html, markdown, raw, *replaced = (one.data for one in found)
    assert base64.b64decode(figure["image/png"]).startswith(b"\x89PNG")
    assert html["text/html"] == "<i>html</i>"
    assert markdown["text/markdown"] == "**md**"
    assert raw == {"image/png": base64.b64encode(b"png").decode(), "text/plain": "x"}
    # What came last for each id, though it came as often as nothing else may.
    last = [data.get("text/html", data["text/plain"]) for data in replaced]
    assert last == ["<i>99</i>", "<i>filled</i>", "'step 2'"]
    handles = run[0]
    assert all(re.fullmatch(r"IPython\.core\.display\w*\.DisplayHandle", one) for one in handles)
    kept = call_of(run).folder.load()
    assert kept.ranks[0].displays == found, "and so it is kept on disk"
    log = run.logs(0)
    assert "step" not in log
    assert "3\n'plain'\n" in log
    assert "not shown: 3.0 MB, the limit is 2 MB" in log


def flood():
    from IPython.display import HTML, display

    for number in range(100):
        display(HTML(f"{number}"))


def test_of_a_flood_the_first_ones_are_sent():
    run = notebook_launcher(flood, num_processes=1, view="none")
    assert 20 <= run.state.ranks[0].num_displays < 30
    assert "this rank displays too much" in run.logs(0)


def display_in_a_child():
    from IPython.display import HTML, display, update_display

    display(HTML("<i>of the rank</i>"), display_id="x")
    pid = os.fork()
    if not pid:
        display(HTML("<i>of a child</i>"))
        update_display(HTML("<i>replaced</i>"), display_id="x")
        os._exit(0)
    os.waitpid(pid, 0)


def test_what_a_child_process_displays_is_printed():
    """A worker of a DataLoader, say."""
    run = notebook_launcher(display_in_a_child, num_processes=1, view="none")
    (shown,) = run.state.ranks[0].displays
    assert shown.data["text/html"] == "<i>of the rank</i>"
    told = "(not shown: a child process of the rank displayed it)"
    assert run.logs(0).splitlines() == [f"<IPython.core.display.HTML object> {told}"] * 2
