"""``runs()`` and ``compare()`` as a notebook shows them: a table of the runs."""

import re

import pytest

from tests.kernel.notebooks import open_notebook

TRAIN = """
from notebook_accel import Accelerator, compare, notebook_launcher, runs

class Model:
    def __repr__(self):
        raise ValueError("nobody asks it")

def train(lr, model, key):
    accelerator = Accelerator()
    for loss, accuracy in ((0.5, 0.25), (0.125, 0.75), (0.25, float("nan")), (0.375, 0.5)):
        accelerator.log({"loss": loss, "accuracy": accuracy, "lr": lr})

def fails():
    raise ValueError("on purpose")

key = "<b>" + "k" * 99
for lr in (0.01, 0.1):
    run = notebook_launcher(train, (lr, Model()), 1, kwargs={"key": key}, name=f"lr {lr}")
"""
FACTS = ["run", "state", "took", "arguments"]
METRICS = ["loss", "best loss", "accuracy", "best accuracy", "lr", "loss curve"]
COLUMNS = [*FACTS, "error", *METRICS, "started", "notebook", "id"]


def shown(notebook, code):
    """What a page shows of the value of a cell, as text and as HTML."""
    data = notebook.shows(code)["data"]
    return data["text/plain"], data["text/html"]


def cells(text):
    """The rows of a table that was shown as text, its head first."""
    return [re.split(r"  +", line) for line in text.splitlines()]


def names(text):
    return [row[0] for row in cells(text)]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_runs_and_comparisons_are_shown_as_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path / "runs"))
    with open_notebook({"JPY_SESSION_NAME": "/home/me/digits.ipynb"}) as notebook:
        notebook.run("from notebook_accel import runs")
        assert "runs(everywhere=True)" in notebook.value("repr(runs())")
        notebook.run(TRAIN)
        notebook.fails("notebook_launcher(fails, num_processes=1)")
        text, html = shown(notebook, "runs()")
        head, first, second, third = cells(text)
        assert head == COLUMNS
        assert first[:2] == ["lr 0.01", "✓ succeeded"]
        assert re.fullmatch(r"\d+\.\d s", first[2])
        assert first[3].startswith("lr=0.01, model=Model, key='<b>kkk")
        assert "k" * 60 not in text
        assert first[4:10] == ["0.375", "0.125", "0.5", "0.75", "0.01", "█▁▃▆"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", first[10])
        assert first[11] == "digits.ipynb"
        assert second[0] == "lr 0.1"
        assert third[:2] == ["fails", "✗ failed"]
        assert "ValueError: on purpose" in third
        assert html.count("<tr>") == 4
        # Failures are red, and a curve has the run's colour in compare().
        assert "text-align:left;color:#cf4f57'>✗ failed</td>" in html
        assert "text-align:left;color:#2f86d6'>█▁▃▆</td>" in html
        assert "text-align:left;color:#d9730d'>█▁▃▆</td>" in html
        table, _ = shown(notebook, "runs(sort='lr', mode='max')")
        assert names(table) == ["run", "lr 0.1", "lr 0.01", "fails"]
        # The best of what it is sorted by is the one that was asked for.
        table, _ = shown(notebook, "runs(sort='loss', mode='max')")
        assert cells(table)[0][5:7] == ["loss", "best loss"]
        assert cells(table)[1][4:6] == ["0.375", "0.5"]
        table, _ = shown(notebook, "runs(sort='accuracy')")
        assert "accuracy curve" in cells(table)[0]
        assert "they logged 'loss', 'accuracy', 'lr'" in notebook.fails("runs(sort='acuracy')")
        assert "&lt;b&gt;kkk" in html
        assert "<b>" not in html
        assert notebook.run("print(runs())") == f"{text}\n"

        # Another kernel reads them from the disk.
        notebook.manager.restart_kernel(now=True)
        notebook.kernel.client.wait_for_ready(timeout=60)
        notebook.run("from notebook_accel import compare, runs\nold = runs(everywhere=True)")
        assert shown(notebook, "old") == (text, html)
        text, _ = shown(notebook, "compare(old[:2])")
        charts, _, table = text.partition("\n\n")
        assert cells(charts)[0] == ["loss", "lr 0.01 (lr=0.01)", "█▁▃▆", "0.375"]
        # As the charts' legend calls them.
        assert names(table) == ["run", "lr 0.01 (lr=0.01)", "lr 0.1 (lr=0.1)"]
        text, _ = shown(notebook, "compare({'slow': old[0], 'fast': old[1]}, names=['loss'])")
        table = text.partition("\n\n")[2]
        assert names(table) == ["run", "slow (lr=0.01)", "fast (lr=0.1)"]
        assert cells(table)[1][4:6] == ["0.375", "0.125"]


SWEEP = """
from notebook_accel import Accelerator, compare, notebook_launcher, runs, sweep

def trial(lr, width):
    if lr > 1:
        raise ValueError("on purpose")
    Accelerator().log({"loss": 8 * lr})
    Accelerator().log({"loss": lr * width})

alone = notebook_launcher(trial, (0.5, 2), 1, name="alone")
space = [dict(lr=0.25, width=3), dict(lr=0.125, width=1), dict(lr=9.0, width=1)]
s = sweep(trial, space, metric="loss", concurrent=1, view="none")
last = notebook_launcher(trial, (0.5, 4), 1, name="last")
"""

MANY = """
from notebook_accel import Accelerator, notebook_launcher

def times():
    Accelerator().log({**{f"time {n}": n for n in range(9)}, "val_loss": 1.0})

notebook_launcher(times, num_processes=1)
"""


def test_a_sweep_is_one_row_that_opens(tmp_path):
    with open_notebook({"NOTEBOOK_ACCEL_RUNS": str(tmp_path / "runs")}) as notebook:
        notebook.run(SWEEP)
        lines, html = shown(notebook, "runs()")
        best = "sweep of trial: 3 trials, 1 failed, best loss 0.125 (lr=0.125, width=1)"
        assert names(lines) == ["run", "alone", best, "last"]
        row = html.partition("<details>")[2].partition("</details>")[0]
        assert row.startswith(f"<summary>{best}</summary><table")
        assert row.count("<tr>") == 4
        assert "ValueError: on purpose" in row
        assert "ValueError" not in html.replace(row, "")
        assert "alone" not in row
        assert html.count("<details>") == 1
        # It is the table alone that is shorter.
        found = "[each.id for each in runs()] == [alone.id, *(each.id for each in s), last.id]"
        assert notebook.run(f"print({found})") == "True\n"
        lines, _ = shown(notebook, "runs(sort='loss')")
        assert names(lines) == ["run", best, "alone", "last"]
        lines, html = shown(notebook, "compare(s.runs, names=['loss'])")
        assert "<details>" not in html
        # All in one line each, however wide.
        assert html.partition("<table")[2].count("white-space:nowrap") > 20

        notebook.manager.restart_kernel(now=True)
        notebook.kernel.client.wait_for_ready(timeout=60)
        lines, html = shown(notebook, "from notebook_accel import runs\nruns(everywhere=True)")
        assert names(lines) == ["run", "alone", best, "last"]
        assert html.count("<details>") == 1
        # More metrics than columns: those that say how good a run is come first.
        notebook.run(MANY)
        lines, _ = shown(notebook, "runs()")
        assert cells(lines)[0][3:6] == ["val_loss", "best val_loss", "time 0"]
