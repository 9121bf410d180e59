"""The live view of a run without a kernel: where its panel goes, and what its end leaves."""

import re
import threading
from collections import deque
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import ipywidgets
import pytest

from notebook_accel import wire
from notebook_accel.launch.control.curves import LiveCurves
from notebook_accel.notebook import display_slot, live_panel, views
from notebook_accel.notebook.clicks import ClicksAfterTheCell, ClicksByPump, ClicksBySubshell
from notebook_accel.notebook.controls import Cloneable, CloneForm
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.views import Dashboard
from notebook_accel.notebook.widgets import PanelWidgets
from notebook_accel.render import panel
from tests.notebook.states import after, running, succeeded
from tests.notebook.widgets import field, inside, live_widgets, part
from tests.waiting import eventually

WIDGET = "application/vnd.jupyter.widget-view+json"


class Page:
    """What a page shows: the content of each slot, and where slots were placed."""

    def __init__(self, monkeypatch):
        self.placed = []
        self.sent = []
        self.shown = {}
        monkeypatch.setattr(display_slot, "display", self.display)
        monkeypatch.setattr(display_slot, "update_display", self.update)

    def display(self, bundle, *, raw, display_id):
        self.placed.append(display_id)
        self.update(bundle, raw=raw, display_id=display_id)

    def update(self, bundle, *, raw, display_id):
        assert raw
        self.sent.append(bundle)
        self.shown[display_id] = bundle

    @property
    def only(self):
        """The content of the only slot."""
        (bundle,) = self.shown.values()
        return bundle


@pytest.fixture(autouse=True)
def page(monkeypatch):
    """A page; runs that a test leaves open on it are ended."""
    monkeypatch.setattr(views, "_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(views, "_PANEL_SECONDS", 0.0)
    yield Page(monkeypatch)
    while _shown:
        shown = _shown.pop()
        shown.end()
        shown.await_last_message()


_shown = []


class Shown:
    """A run without processes, whose state the test sets, and its view."""

    def __init__(self, slot=None, *, waits=True, clicks=ClicksAfterTheCell, **more):
        self.run = SimpleNamespace(
            id="calm-otter",
            state=running(2),
            config=SimpleNamespace(grace=10.0),
            world_size=2,
            log_dir="/runs/1",
            _request=None,
            _call=SimpleNamespace(
                can_act=False, curves=LiveCurves(), metrics=SimpleNamespace(sample=list), **more
            ),
            **more,
        )
        self.view = Dashboard(clicks(None), waits=waits, slot=slot)
        before = set(threading.enumerate())
        self.view.open(self.run)
        (self.thread,) = set(threading.enumerate()) - before
        _shown.append(self)
        self.view.draw()

    @property
    def panel(self):
        return self.view.panel

    def field(self, label):
        """A field or a button of the panel."""
        return field(self.panel.box, label)

    def part(self, name):
        """What the panel shows in one place: "na-body"."""
        return part(self.panel.box, name)

    def end(self):
        """End the run, without what is sent a moment later."""
        self.run.state = succeeded(self.run.state)
        self.view.close(self.run.state)

    def await_last_message(self):
        self.thread.join(100)
        assert not self.thread.is_alive()


def test_a_run_that_ends_at_once_has_a_summary_and_never_a_widget(page, monkeypatch):
    monkeypatch.setattr(views, "_PANEL_SECONDS", 600.0)
    before = live_widgets()
    shown = Shown()
    assert page.only["text/plain"].startswith("train: running, 2 ranks")
    shown.end()
    ended = dict(page.only)
    assert "succeeded" in ended["text/html"]
    assert "<table" in ended["text/html"]
    shown.await_last_message()
    assert page.sent[-2:] == [ended, ended]
    assert live_widgets() == before


def test_the_end_that_is_sent_again_leaves_a_newer_run_in_the_same_slot(page, monkeypatch):
    monkeypatch.setattr(views, "_AGAIN_SECONDS", 0.2)
    slot = DisplaySlot()
    first = Shown(slot)
    assert page.only[WIDGET]["model_id"] == first.panel.box.model_id
    first.end()
    assert "succeeded" in page.only["text/html"]
    second = Shown(slot)
    first.await_last_message()
    assert page.only[WIDGET]["model_id"] == second.panel.box.model_id
    second.end()
    second.await_last_message()
    assert "succeeded" in page.only["text/html"]


def test_shown_in_another_cell_a_live_run_has_the_same_panel_there(page):
    shown = Shown()
    before = live_widgets()
    shown.view.reopen(shown.run)
    assert live_widgets() == before
    (panel,) = page.shown
    assert page.shown[panel][WIDGET]["model_id"] == shown.panel.box.model_id
    shown.view.reopen(shown.run)
    assert page.placed == [panel, panel, panel]
    shown.end()
    assert "succeeded" in page.shown[panel]["text/html"]


@pytest.mark.parametrize(
    ("clicks", "on_panel", "on_stop"),
    [
        (ClicksAfterTheCell, "use the kernel&#39;s Interrupt", "as well."),
        (ClicksByPump, "", "clicks wait for its end."),
        (ClicksBySubshell, "", "as well."),
    ],
)
def test_the_panel_says_where_clicks_wait(clicks, on_panel, on_stop):
    shown = Shown(clicks=clicks)
    html = "".join(str(getattr(widget, "value", "")) for widget in shown.panel.box.children)
    assert (on_panel in html, "'na na-muted na-advice'" in html) == (True, bool(on_panel))
    assert shown.field("Stop").tooltip.endswith(on_stop)


def inputs(widget):
    """What a person can use of a tree of widgets: all but its boxes and what is only read."""
    return [one for one in inside(widget) if not isinstance(one, (ipywidgets.Box, ipywidgets.HTML))]


def test_all_that_can_be_clicked_is_let_through_before_a_page_shows_it(page, monkeypatch):
    """On ipykernel 7.4 an earlier click waits for the cell, and the cell maybe for the click."""
    let_through = []
    found = []

    class Clicks(ClicksAfterTheCell):
        def let_through(self, widget):
            let_through.append(widget)

    def update(bundle, **more):
        if WIDGET in bundle:
            panel = live_widgets()[bundle[WIDGET]["model_id"]]
            found.append((inputs(panel), [*let_through]))
        page.update(bundle, **more)

    monkeypatch.setattr(display_slot, "update_display", update)
    shown = Shown(clicks=Clicks)
    ((clickable, let_through_by_then),) = found
    assert {shown.field("Stop"), shown.field("Search the output")} <= set(clickable)
    assert set(clickable) <= set(let_through_by_then)
    # A screen reader says an arrow by its shape.
    assert len(clickable) >= 12
    for widget in clickable:
        assert re.search("[A-Za-z]{3}", widget.description)
        assert widget.tooltip


def test_stop_is_asked_for_once_until_the_panel_says_what_a_second_click_does(clock):
    stopped = []
    shown = Shown(stop=lambda: stopped.append(clock.now))
    button = shown.field("Stop")
    for words in ("Interrupt", "last_run().rescued", "should_stop"):
        assert words in button.tooltip
    button.click()
    button.click()
    shown.run.state = replace(shown.run.state, status="stopping")
    shown.panel.read(shown.run.state)

    def click_at(now):
        # Or the view's own thread puts in its place what it drew at the time before.
        with shown.view._lock:
            clock.now = now
            shown.panel.draw(shown.run.state)
            button.click()
            return "Stop again interrupts them" in shown.part("na-body").value

    assert [click_at(now) for now in (1000.0, 1001.0, 1002.0)] == [False, False, True]
    assert click_at(1003.0)
    assert stopped == [1000.0, 1002.0]


def test_a_double_click_does_not_kill(clock):
    killed = []
    kill = Shown(kill=lambda: killed.append(clock.now)).field("Kill")
    for clock.now in (1000.0, 1000.3, 1004.5, 1004.8, 1005.0, 1006.5):
        kill.click()
    assert killed == [1006.5]


def test_what_cannot_be_drawn_stops_no_panel(monkeypatch):
    def logs(rank, max_bytes=None):
        raise FileNotFoundError("run calm-otter was deleted from disk")

    def fail(*_, **_more):
        drawn.set()
        raise ZeroDivisionError

    drawn = threading.Event()
    shown = Shown(logs=logs)
    with monkeypatch.context() as context:
        context.setattr(panel, "render_panel", fail)
        for _ in range(2):
            assert drawn.wait(100)
            drawn.clear()
    shown.field("Save").click()
    await_link(shown, "was deleted from disk")


def await_link(shown, *texts):
    """Wait until the panel has a link with these texts."""
    link = shown.part("na-link")
    eventually(lambda: all(text in link.value for text in texts), what=f"link: {texts}")


def test_of_a_large_log_a_link_saves_the_end(monkeypatch):
    monkeypatch.setattr(live_panel, "_MAX_LINK_BYTES", 3_000)
    asked = []

    def last(rank, max_bytes):
        asked.append((rank, max_bytes))
        return "the end\n" * 250

    shown = Shown(logs=last)
    grown = [replace(rank, log_end=5_000) for rank in shown.run.state.ranks]
    shown.run.state = replace(shown.run.state, ranks=tuple(grown))
    shown.field("Save").click()
    await_link(
        shown,
        "all ranks, last 2 KB of 10 KB",
        "title='All of it is in /runs/1'",
        "download='calm-otter-all-ranks.txt'",
    )
    shown.field("Output of").value = 1
    shown.field("Save").click()
    await_link(shown, "rank 1, last 2 KB of 5 KB")
    assert asked == [(None, 3_000), (1, 3_000)]


def displayed(rank, html):
    return wire.Displayed(rank=rank, data={"text/html": html, "text/plain": "<HTML>"})


def displays_of(shown):
    """The widget with what a rank displayed."""
    return shown.panel.box.children[-2]


def test_where_a_cell_waits_what_a_rank_displays_is_an_output_of_its_own(page):
    shown = Shown()
    shown.run.state = after(shown.run.state, displayed(0, "<i>of 0</i>"))
    shown.view.update(shown.run.state)
    shown.view.poll()
    shown.view.poll()
    panel, *outputs = page.shown.values()
    assert [bundle["text/html"].count("of 0") for bundle in outputs] == [0, 1]
    assert WIDGET in panel
    shown.end()
    assert "of 0" not in next(iter(page.shown.values()))["text/html"]
    shown.view.show_displays(shown.run, 1)
    assert list(page.shown.values())[-1]["text/plain"] == "rank 1 displayed nothing"
    # Nobody asked for what a rank displayed: of a run without it, the summary alone is shown.
    before = len(page.shown)
    shown.run.state = succeeded(running(2))
    shown.view.reopen(shown.run)
    assert len(page.shown) == before + 1


def test_what_is_displayed_in_a_loop_does_not_flood_the_page(clock):
    shown = Shown()
    sent = []
    displays_of(shown).observe(lambda _: sent.append(clock.now), names="value")
    state = shown.run.state
    for clock.now, html in (
        (1000.0, "1"),
        (1000.5, "2"),
        (1001.1, "3"),
        (1003.0, "x" * 600_000),
        (1004.5, "5"),
        (1005.1, "6"),
    ):
        data = {"text/html": html}
        # Each in the place of the one before.
        plot = wire.Displayed(rank=0, data=data, display_id="plot", replaces=True)
        state = after(state, plot)
        shown.panel.draw_displays(state)
    assert sent == [1000.0, 1001.1, 1003.0, 1005.1]


@pytest.mark.parametrize("limit", ["_MAX_ENDED", "_MAX_ENDED_SIZE"])
def test_widgets_of_older_runs_are_closed(monkeypatch, limit):
    monkeypatch.setattr(live_panel, limit, 1)
    monkeypatch.setattr(live_panel, "_ended", deque())
    left = []
    for _ in range(3):
        shown = Shown()
        shown.end()
        shown.await_last_message()
        left.append(len(live_widgets()))
    assert left[1] == left[2] == left[0]


def test_what_a_page_chooses_at_the_news_of_more_options_stays_chosen():
    widgets = PanelWidgets()
    choice = widgets.make(ipywidgets.Dropdown, options=["first"])

    def tell(data, **_):
        if "_options_labels" in data["state"]:
            choice.set_state({"index": 2})

    choice.comm = SimpleNamespace(send=tell, comm_id="", on_msg=lambda _: None, close=lambda: None)
    widgets.offer(choice, ["first", "second", "third"])
    assert choice.value == "third"
    choice.comm = None
    widgets.close()


def test_a_clone_form_opens_again_only_where_nothing_else_was_done_with_it():
    goes_on, widgets = threading.Semaphore(0), PanelWidgets()
    said = []

    def clone(*_, **__):
        goes_on.acquire()
        raise ValueError("no step came")

    def train(lr): ...

    run = SimpleNamespace(state=running(2))
    form = CloneForm(widgets, lambda: Cloneable(run, partial(train, 0.1), clone), said.append)
    refused = lambda: said[-1:] == ["Clone: no step came"]  # noqa: E731
    form.button.click()
    field(form.box, "Cancel").click()
    assert not form.box.children
    for others, is_open in (((), True), ((form.close,), False), ((form.button.click,) * 2, False)):
        form.close()
        form.button.click()
        field(form.box, "lr").value = 0.2
        start = field(form.box, "Start")
        start.click()
        start.click()  # the second one of a double click
        for act in others:
            act()
        goes_on.release()
        eventually(refused, what="the panel says why")
        assert bool(form.box.children) == is_open
        said.clear()
        assert not is_open or field(form.box, "lr").value == 0.2
    widgets.close()
