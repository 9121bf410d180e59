import io
from types import SimpleNamespace

from notebook_accel import wire
from notebook_accel.launch.view import plain
from notebook_accel.launch.view.plain import PlainView
from notebook_accel.system import limits
from tests.notebook.states import after, logged, running, succeeded


class Shown:
    """A view with a run whose state the test sets, and what it printed."""

    def __init__(self):
        self.stream = io.StringIO()
        self.run = SimpleNamespace(state=running(2), log_dir="/runs/1", metrics=[])
        self.view = PlainView(self.stream)
        self.view.open(self.run)

    def poll(self, state):
        """What a look at the state adds."""
        self.run.state = state
        before = len(self.stream.getvalue())
        self.view.poll()
        return self.stream.getvalue()[before:].splitlines()

    def print_end(self, state):
        self.run.state = state
        before = len(self.stream.getvalue())
        self.view.print_end()
        return self.stream.getvalue()[before:].splitlines()


def output(rank, text, skipped=0):
    return wire.Output(rank=rank, text=text, skipped=skipped)


def test_each_line_is_printed_once_with_its_rank():
    shown = Shown()
    state = after(running(2), output(0, "a\nb\n"), output(1, "\x1b[31mc\x1b[0m\n"))
    assert shown.poll(state) == ["[rank 0] a", "[rank 0] b", "[rank 1] c"]
    assert shown.poll(state) == []
    assert shown.poll(after(state, output(0, "d\n"))) == ["[rank 0] d"]


def test_a_line_is_printed_when_it_is_whole_or_the_run_has_ended():
    shown = Shown()
    state = after(running(2), output(0, "half"))
    assert shown.poll(state) == []
    state = after(state, output(0, " and half\nlast"))
    assert shown.poll(state) == ["[rank 0] half and half"]
    ended = shown.print_end(succeeded(state))
    assert ended[0] == "[rank 0] last"
    assert ended[1].startswith("train: succeeded")


def test_lines_beyond_the_budget_wait_or_are_counted(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(plain, "_BURST", 10)
    monkeypatch.setattr(plain, "_LINES_PER_SECOND", 1.0)
    shown = Shown()
    state = after(running(2), output(0, "".join(f"{n}\n" for n in range(150))))
    assert shown.poll(state) == [
        "[rank 0] … 140 lines not shown, whole in /runs/1",
        *(f"[rank 0] {n}" for n in range(140, 150)),
    ]
    # Until the next may be printed, lines wait.
    state = after(state, output(0, "w\n"), output(1, "z\n"))
    assert shown.poll(state) == []
    state = after(state, output(0, "x\ny\n", skipped=100_000))
    assert shown.poll(state) == []
    clock.now += 3.0
    assert shown.poll(state) == [
        "[rank 0] … 100,002 lines not shown, whole in /runs/1",
        "[rank 0] y",
        "[rank 1] z",
    ]
    # A line that counts others is a line, too.
    printed = 0
    for _ in range(100):
        clock.now += 0.1
        state = after(state, output(0, "a\nb\n"), output(1, "c\nd\n"))
        printed += len(shown.poll(state))
    assert 6 <= printed <= 12
    # At the end each rank's last line is there.
    state = after(state, output(0, "a\n" * 9), output(1, "c\nd\n" * 9))
    assert shown.poll(state) == []
    ended = shown.print_end(succeeded(after(state, output(0, "last\n"))))
    assert "[rank 0] last" in ended
    assert "[rank 1] d" in ended


def test_lines_that_the_state_no_longer_holds_are_counted():
    shown = Shown()
    assert shown.poll(after(running(2), output(0, "".join(f"{n}\n" for n in range(3000))))) == [
        "[rank 0] … 2,600 lines not shown, whole in /runs/1",
        *(f"[rank 0] {n}" for n in range(2600, 3000)),
    ]


def test_progress_and_metrics_come_now_and_then_and_once(monkeypatch):
    monkeypatch.setattr(plain, "_PROGRESS_SECONDS", 0.0)
    shown = Shown()
    bar = wire.Bar(rank=0, bar=1, name="epoch 1", n=50, total=100, rate=10.0)
    state = after(running(2), bar, logged(0, {"loss": 0.25}))
    line = "[rank 0] epoch 1  50%  50/100  10.0 it/s  0:05 left  loss 0.25"
    assert shown.poll(state) == [line]
    assert shown.poll(state) == []
    monkeypatch.undo()
    assert Shown().poll(state) == []


def test_notices_are_printed_once():
    shown = Shown()
    state = after(running(2), wire.Notice(text="mind this"))
    assert shown.poll(state) == ["notebook_accel: mind this"]
    assert shown.poll(after(state, wire.Notice(text="and this"))) == ["notebook_accel: and this"]


def test_the_end_is_told_once():
    shown = Shown()
    assert len(shown.print_end(succeeded(running(2)))) == 4
    assert shown.print_end(succeeded(running(2))) == []


def test_of_what_a_rank_displayed_its_text_is_printed():
    shown = Shown()
    figure = {"image/png": "AAAA", "text/plain": "<Figure>\x1b[2J\n  with 1 Axes"}
    for data in (figure, {"image/png": "AAAA", "text/html": "<b>"}):
        shown.run.state = after(shown.run.state, wire.Displayed(rank=1, data=data))
    for rank in (0, 1):
        shown.view.show_displays(shown.run, rank)
    assert shown.stream.getvalue().splitlines() == [
        "rank 0 displayed nothing",
        "rank 1 displayed, as text (a notebook draws it):",
        "<Figure>",
        "  with 1 Axes",
        "image/png, text/html",
    ]


def test_it_prints_where_standard_output_goes_now(capsys):
    view = PlainView()
    run = SimpleNamespace(state=after(running(1), output(0, "a\n")), log_dir="")
    view.open(run)
    view.poll()
    assert capsys.readouterr().out == "[rank 0] a\n"


def test_nothing_that_a_terminal_obeys_is_printed(monkeypatch):
    monkeypatch.setattr(plain, "_PROGRESS_SECONDS", 0.0)
    shown = Shown()
    hostile = "a\x1b[2J\x9b31m\x00\u202e\nFAKE: 1"
    bar = wire.Bar(rank=0, bar=0, name=hostile, n=1, total=3, rate=1.0, elapsed=1.0, unit="it")
    state = after(
        running(1, name=hostile),
        output(0, f"{hostile}\n"),
        logged(0, {hostile: 1.0, "big" * 400_000: 2.0}),
        wire.Notice(text=hostile),
        bar,
    )
    lines = [*shown.poll(state), *shown.print_end(succeeded(state))]
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 2100
    assert sum(line.startswith("FAKE") for line in lines) == 0
