"""Sweeps: trials are real runs on real processes; what is bad is told before or after."""

import math
import os
import re
import signal
import textwrap
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import optuna
import psutil
import pytest
from torch.utils.data import DataLoader, IterableDataset

from notebook_accel import Accelerator, ConfigError, NotebookAccelError, WorkerError, sweep
from notebook_accel.launch import run_list
from notebook_accel.launch.control.run_folder import RunFolder
from notebook_accel.launch.control.run_state import starting
from notebook_accel.notebook.sweeps.panel import as_bundle, in_order
from notebook_accel.notebook.sweeps.space import Arguments
from notebook_accel.notebook.sweeps.trial import SweepFolder, Trial, TrialChoice
from notebook_accel.render.markup import message_bytes
from tests.kernel.notebooks import open_notebook
from tests.waiting import eventually

SOON = 60.0


@pytest.fixture(autouse=True)
def _runs_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path / "runs"))


def train(lr, width=1, *, steps=3, seconds=0.0):
    accelerator = Accelerator(cpu=True)
    for step in range(steps):
        accelerator.log({"loss": lr * width / (step + 1)}, step=step)
        time.sleep(seconds)
        if accelerator.should_stop:
            break
    return lr


def on_cpu(function, space, **asked):
    return sweep(function, space, **{"devices": "cpu", "view": "none", **asked})


def test_a_grid_of_four_on_two_ranks_each_finds_its_best_and_two_run_at_a_time():
    space = {"lr": [0.4, 0.2], "width": [1, 2]}
    found = on_cpu(
        train, space, metric="loss", num_processes=2, concurrent=2, kwargs={"seconds": 0.2}
    )
    assert [run.state.arguments for run in found] == [
        f"seconds=0.2, lr={lr}, width={width}" for lr in (0.4, 0.2) for width in (1, 2)
    ]
    assert len(found) == 4
    assert {run.status for run in found.runs} == {"succeeded"}
    assert [run.results for run in found] == [[0.4] * 2, [0.4] * 2, [0.2] * 2, [0.2] * 2]
    assert found.best is found.runs[2]
    spans = [(run.state.started, max(row["time"] for row in run.metrics)) for run in found]
    at_a_time = [sum(a <= start < b for a, b in spans) for start, _ in spans]
    assert max(at_a_time) == 2, "never three, and not one after the other"
    frame = found.to_pandas()
    assert frame[["trial", "lr", "width", "state"]].iloc[-1].tolist() == [3, 0.2, 2, "succeeded"]
    assert frame["loss"].tolist() == pytest.approx([0.4 / 3, 0.8 / 3, 0.2 / 3, 0.4 / 3])
    found.show()


def test_a_failing_trial_is_a_row_and_the_others_go_on(capsys):
    def divides(by):
        if by == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        Accelerator(cpu=True).log({"score": 1 / by})

    space = [{"by": 1}, {"by": 0}, {"by": 3}, {"by": 2}]
    found = on_cpu(divides, space, metric="score", mode="max")
    assert [run.status for run in found] == ["succeeded", "failed", "failed", "succeeded"]
    assert found.best is found.runs[0]
    found.show()
    shown = capsys.readouterr().out
    assert "2 failed, best is trial 0 (score 1)" in shown
    assert "ZeroDivisionError: division by zero" in shown
    assert re.search(r"failed +3 .*SIGKILL", shown)


def test_failures_that_are_alike_end_the_sweep_with_the_first_of_them():
    def fails(number):
        raise ValueError(f"number {number}")

    with pytest.raises(WorkerError, match="number 0") as caught:
        on_cpu(fails, {"number": range(50)}, concurrent=1, max_failures=2)
    found = caught.value.sweep
    assert len(found) == 2
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_runs_counts_for_the_best_and_stop_ends_it_and_starts_no_more():
    asked = {"metric": "loss", "concurrent": 2, "block": False}
    found = on_cpu(train, {"lr": [1.0] * 20}, kwargs={"steps": 9999, "seconds": 0.05}, **asked)
    eventually(lambda: len(found) == 2, within=SOON, what="two run")
    with pytest.raises(TimeoutError, match="goes on"):
        found.wait(0.01)
    for run in found:
        eventually(lambda run=run: bool(run.metrics), within=SOON, what="it trains")
    best = re.compile(r": 0 of 20 trials ended, 2 running, best is trial [01] \(loss 0\.")
    eventually(lambda: best.search(repr(found)), within=SOON, what="it goes by what runs, too")
    found.stop()
    assert found.wait(SOON) is found
    assert len(found) == 2
    assert [run.results for run in found] == [[1.0], [1.0]], "by should_stop"


def test_clones_begin_next_and_in_a_later_kernel_take_no_other_trials_place():
    folder, asked = SweepFolder(), dict.fromkeys(("num_trials", "sampler"))
    pruner = optuna.pruners.NopPruner()
    how = dict(space=[{"lr": 1.0}, {"lr": 2.0}], metric="loss", mode="min", pruner=pruner, **asked)
    arguments, later = Arguments(how, folder), Arguments(how, folder)
    began = [arguments.ask()[0]]
    clones = [TrialChoice({"lr": lr}, {}, "origin") for lr in (3.0, 4.0)]
    assert [arguments.add(clone) for clone in clones] == [1, 2]
    began += [arguments.ask()[0], arguments.ask()[0]]
    assert [one.arguments["lr"] for one in began] == [1.0, 3.0, 4.0]
    arguments.ask()  # the kernel ended before this one began
    for one in began:
        later.ask_again(one)
    later.give_up_others()
    assert [each.state.name for each in later.study.trials] == ["RUNNING", "FAIL"]
    assert not later.close(at_once=False), "one is still to begin"
    assert (later.num_trials, later.ask()[0].arguments) == (4, {"lr": 2.0})
    assert later.close(at_once=False)
    with pytest.raises(RuntimeError, match=r"the sweep has ended: clone .* run.clone\(\)"):
        later.add(clones[0])


def test_bad_input_starts_nothing():
    before = len(run_list.runs())
    for error, space, asked in [
        ("no trial", {}, {}),
        ("no trial", [], {}),
        ("no trial", {"lr": []}, {}),
        ("is no list", {"lr": 0.1}, {}),
        ("expected a dictionary of lists", 3, {}),
        ("space: 1 is no name", [{"lr": 1, 1: 2}], {}),
        ("takes no argument 'lrr'; did you mean lr", {"lrr": [1]}, {}),
        ("unexpected keyword argument 'b'", [{"lr": 1}, {"lr": 2, "b": 1}], {}),
        ("lr: both in space and in args or kwargs", {"lr": [1]}, {"args": (1,)}),
        ("lr: both in space and in args or kwargs", {"lr": [1]}, {"kwargs": {"lr": 1}}),
        ("only for a space of Optuna", {"lr": [1]}, {"num_trials": 3}),
        ("metric is missing", {"lr": [1]}, {"pruner": object()}),
        ("did you mean concurrent", {"lr": [1]}, {"concurent": 2}),
        ("takes no session", {"lr": [1]}, {"session": True}),
        ("mode='lowest'", {"lr": [1]}, {"mode": "lowest"}),
        ("needs metric=", {"lr": [1]}, {"rounds": 8}),
        ("rounds=0", {"lr": [1]}, {"rounds": 0}),
        ("cannot be paused", {"lr": [1]}, {"detach": True, "rounds": 2, "metric": "loss"}),
        ("expected one of 'auto', 'local'", {"lr": [1]}, {"engine": "elastic"}),
        ("keep its place", {"lr": [1]}, {"engine": "ray", "rounds": 2, "metric": "loss"}),
        ("view='big'", {"lr": [1]}, {"view": "big"}),
    ]:
        with pytest.raises(ConfigError, match=error):
            on_cpu(train, space, **asked)
    assert len(run_list.runs()) == before


def test_a_metric_that_no_trial_logs_is_told_with_those_that_they_log():
    with pytest.raises(ConfigError, match="no trial has logged 'los'; they logged loss") as caught:
        on_cpu(train, {"lr": [0.1] * 20}, metric="los", concurrent=1, max_failures=2)
    assert len(caught.value.sweep) == 2, "the other trials would log it neither"


def test_a_value_that_is_not_finite_is_never_the_best():
    found = on_cpu(train, {"lr": [float("nan"), 5.0, float("-inf")]}, metric="loss")
    assert found.best is found.runs[1]
    with pytest.raises(NotebookAccelError, match="no trial has a finite value of 'loss'"):
        _ = on_cpu(train, {"lr": [float("nan")]}, metric="loss").best
    with pytest.raises(ConfigError, match="no metric="):
        _ = on_cpu(train, {"lr": [1.0]}).best


def test_what_failed_has_no_best_and_a_table_keeps_all_arguments():
    def fails(lr):
        Accelerator(cpu=True).log({"loss": lr})
        raise ValueError("oops")

    found = on_cpu(fails, {"lr": [0.5, 1.0]}, metric="loss")
    with pytest.raises(NotebookAccelError, match="all 2 trials failed, the first with: ValueError"):
        _ = found.best

    def named(trial, run):
        Accelerator(cpu=True).log({"state": trial + run})

    table = on_cpu(named, {"trial": [7], "run": np.arange(2)}, metric="state").to_pandas()
    assert table[["trial_number", "trial", "run", "value"]].values.tolist() == [
        [0, 7, 0, 7],
        [1, 7, 1, 8],
    ]


def test_a_pruner_sees_the_values_of_steps_that_begin_anew():

    def epochs(lr):
        for epoch in range(2):
            for step in range(3):
                Accelerator(cpu=True).log({"loss": lr - epoch - step}, step=step)

    found = on_cpu(epochs, {"lr": [9]}, metric="loss", pruner=optuna.pruners.NopPruner())
    seen = found.study.trials[0].intermediate_values
    assert seen == {0: 9, 1: 8, 2: 7, 3: 8, 4: 7, 5: 6}


def test_optuna_samples_and_is_told_and_its_pruner_stops_trials():
    space = {"lr": optuna.distributions.FloatDistribution(0.1, 1.0)}
    sampler = optuna.samplers.RandomSampler(seed=1)
    found = on_cpu(train, space, metric="loss", num_trials=3, sampler=sampler)
    assert [trial.value for trial in found.study.trials] == [
        run.metrics[-1]["value"] for run in found
    ]
    assert found.best[0] == found.study.best_params["lr"]

    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    found = on_cpu(
        train,
        [{"lr": 0.1, "steps": 3}, {"lr": 0.9, "steps": 9999, "seconds": 0.05}],
        metric="loss",
        pruner=pruner,
        concurrent=1,
    )
    assert [trial.state.name for trial in found.study.trials] == ["COMPLETE", "PRUNED"]
    assert found.to_pandas()["state"].tolist() == ["succeeded", "pruned"]
    assert found.runs[1][0] == 0.9, "what it had is kept"
    assert found.best is found.runs[0]


def epoch(lr, seconds=0.02, turns=None):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(80), batch_size=1))
    for step, _ in enumerate(loader):
        accelerator.log({"loss": lr + 1 / (step + 1)}, step=step)
        # It takes its time until its first turn has ended, which may be noticed late.
        waits = turns is not None and step >= 20 and not (turns / f"{lr} had one").exists()
        time.sleep(0.4 if waits else seconds)
    return step + 1


class Pruner(optuna.pruners.MedianPruner):
    """Leaves a file for each trial that has had a turn."""

    def __init__(self, turns, rates, **how):
        super().__init__(**how)
        self.turns, self.rates = turns, rates

    def prune(self, study, trial):
        (self.turns / f"{self.rates[trial.number]} had one").touch()
        return super().prune(study, trial)


def test_in_turns_every_trial_is_seen_early_and_the_pruner_decides_after_each(tmp_path):
    rates = [0.5, 0.1, 0.4, 0.2]
    pruner, kwargs = Pruner(tmp_path, rates, n_startup_trials=2), {"turns": tmp_path}
    asked = {"metric": "loss", "concurrent": 1, "rounds": 4, "pruner": pruner, "kwargs": kwargs}
    found = on_cpu(epoch, {"lr": rates}, **asked)
    assert found.to_pandas()["state"].tolist() == ["pruned", "succeeded", "pruned", "pruned"]
    assert found.best[0] == 80
    rows = [run.metrics for run in found]
    second_turn = next(row["time"] for row in rows[1] if row["step"] > 50)
    assert max(each[0]["time"] for each in rows) < second_turn, "all are seen before"
    assert all(10 < len(each) < 75 for each in (rows[0], rows[2])), "after a share of the epoch"
    # No two trained at a time.
    spans = sorted((row["time"], number) for number, each in enumerate(rows) for row in each)
    changes = sum(one[1] != other[1] for one, other in pairwise(spans))
    assert changes < 16
    states = [trial.state.name for trial in found.study.trials]
    assert states == ["PRUNED", "COMPLETE", "PRUNED", "PRUNED"]


def test_a_trial_that_has_nan_after_its_turn_is_pruned_and_what_cannot_pause_goes_on(tmp_path):
    asked = {"metric": "loss", "concurrent": 1, "rounds": 4}
    rates = [0.1, float("nan")]
    pruner, kwargs = Pruner(tmp_path, rates, n_startup_trials=1), {"turns": tmp_path}
    found = on_cpu(epoch, {"lr": rates}, pruner=pruner, kwargs=kwargs, **asked)
    assert found.to_pandas()["state"].tolist() == ["succeeded", "pruned"]
    assert found.best is found.runs[0]

    def reads_no_point(lr):
        accelerator = Accelerator(cpu=True)
        for step in range(30):
            accelerator.log({"loss": lr}, step=step)
            time.sleep(0.1)
        return lr

    found = on_cpu(reads_no_point, {"lr": [0.1, 0.2]}, **asked)
    assert [run.results for run in found] == [[0.1], [0.2]]


def test_stop_all_does_not_interrupt_a_pruned_trial_that_still_writes_what_it_has(tmp_path):
    class AtOnce(optuna.pruners.BasePruner):
        def prune(self, _study, trial):
            return trial.last_step >= 1

    def saves(lr):
        assert train(lr, steps=1_000, seconds=0.05) == lr
        while not stopped.exists():
            time.sleep(0.01)
        time.sleep(1)
        return "saved"

    stopped = tmp_path / "stopped"
    found = on_cpu(saves, {"lr": [0.1]}, metric="loss", pruner=AtOnce(), block=False)
    eventually(lambda: [run.status for run in found] == ["stopping"], what="it is pruned")
    found.stop()
    stopped.touch()
    assert found.wait(SOON).runs[0].results == ["saved"]


def test_where_host_memory_is_short_a_trial_begins_once_the_one_before_has_ended(monkeypatch):
    no_memory = psutil.virtual_memory()._replace(available=0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: no_memory)
    asked = {"metric": "loss", "concurrent": 1, "rounds": 4, "kwargs": {"seconds": 0.005}}
    found = on_cpu(epoch, {"lr": [0.1, 0.2, 0.3]}, **asked)
    times = [[row["time"] for row in run.metrics] for run in found]
    assert all(max(one) < min(other) for one, other in pairwise(times))
    assert found._notes() == ["host memory is short: no further trial begins until one has ended"]


def test_a_trial_that_ends_in_its_first_turn_is_not_said_to_refuse_the_pause():
    asked = {"metric": "loss", "concurrent": 1, "rounds": 80, "kwargs": {"seconds": 0.0}}
    found = on_cpu(epoch, {"lr": range(8)}, **asked)
    assert [run.results for run in found] == [[80]] * 8
    assert found._notes() == []


def test_turns_over_a_loader_without_a_length_are_refused_and_no_trial_is_left(monkeypatch):
    class Stream(IterableDataset[int]):
        def __iter__(self):
            return iter(range(1000))

    def streams(lr):
        accelerator = Accelerator(cpu=True)
        try:
            for step, _ in enumerate(accelerator.prepare(DataLoader(Stream(), batch_size=1))):
                accelerator.log({"loss": lr}, step=step)
                time.sleep(0.05)
        finally:
            time.sleep(1.5)  # it takes its time to leave

    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    refused = "rounds=4: the loader of trial 0 has no length"
    with pytest.raises(ConfigError, match=refused) as caught:
        on_cpu(streams, {"lr": [0.1, 0.2]}, metric="loss", concurrent=1, rounds=4)
    assert [run.status for run in caught.value.sweep] == ["stopped"]
    assert raised == []


def test_a_stop_ends_paused_trials():
    asked = {"metric": "loss", "concurrent": 1, "rounds": 8, "block": False}
    found = on_cpu(epoch, {"lr": [0.1, 0.2, 0.3]}, kwargs={"seconds": 0.2}, **asked)
    eventually(lambda: len(found) == 3, within=SOON, what="the third has its turn")
    assert "2 paused" in repr(found)
    found.stop()
    found.wait(SOON)
    assert {run.status for run in found} == {"stopped"}


def test_distributions_need_a_number_and_optuna(monkeypatch):
    space = {"lr": optuna.distributions.FloatDistribution(0.1, 1.0)}
    for error, asked in [
        ("num_trials is missing", {"metric": "loss"}),
        ("metric is missing", {"num_trials": 2}),
    ]:
        with pytest.raises(ConfigError, match=error):
            on_cpu(train, space, **asked)
    with pytest.raises(ConfigError, match="CategoricalDistribution"):
        on_cpu(train, {**space, "width": [1, 2]}, metric="loss", num_trials=2)
    with pytest.raises(ConfigError, match="takes no argument 'lrr'"):
        on_cpu(train, {"lrr": space["lr"]}, metric="loss", num_trials=2)
    assert not SweepFolder().path.parent.exists(), "a study without trials"
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ImportError, match="pip install optuna"):
        on_cpu(train, space, metric="loss", num_trials=2)


@dataclass(kw_only=True)
class Seen(Trial):
    """A trial that has logged, without a process."""

    state: str = "running"

    def __post_init__(self):
        pass

    @property
    def status(self):
        return self.state


def seen(number, values, **arguments):
    state = SimpleNamespace(
        started=0.0, now=lambda: 90.0, ended=None, has_ended=False, failure=None
    )
    run = SimpleNamespace(state=state, status="running")
    trial = Seen(number=number, chosen=TrialChoice(arguments, {}), run=run, asked=None, mode="min")
    for step, value in enumerate(values):
        trial.newest = value
        trial.curve.add(step, value)
    return trial


def test_text_of_trials_is_escaped():
    trials = [seen(0, [1.0, 2.0], **{"<q>": "<script>&"})]
    for is_live in (False, True):
        html = as_bundle("<u>", trials, "<u>", ["<u>"], is_live=is_live)["text/html"]
        assert "&lt;script&gt;&amp;" in html
        assert not [tag for tag in ("<q>", "<u>", "<script>") if tag in html]


def test_200_trials_are_an_update_of_20_kb_with_all_curves_and_one_that_diverges():
    trials = [
        seen(
            number, [math.exp(-step / (9 + number)) + number / 99 for step in range(300)], lr=number
        )
        for number in range(200)
    ]
    trials.append(seen(200, [1e30 * step for step in range(300)], lr=1e9))
    ordered = in_order(trials, "min")
    html = as_bundle("sweep", ordered, "loss", [], is_live=True, picked=3)["text/html"]
    assert message_bytes(html) < 20_000
    assert "<style" not in html, "the panel has it once"
    assert html.count("<tr data-n=") > 20
    assert "data-n='3' aria-selected='true'" in html
    pale, best = re.findall("<path d='([^']*)'", html)
    assert (pale.count("M"), best.count("M")) == (199, 1)
    assert re.search(r"data-said='trial \d+ \(lr=\d+\): 0.\d", html), "on hover"
    assert "e+" not in "".join(re.findall(r"na-tick-\w+'>([^<]*)", html)), "it flattens no other"
    saved = as_bundle("sweep", trials, "loss", [])
    assert saved["text/html"].count("<img") == 2
    assert saved["text/html"].count("<tr>") == 201 == len(saved["text/plain"].splitlines()) - 2


def test_a_notebook_shows_one_table_and_an_interrupt_stops_all_trials(tmp_path):
    with open_notebook() as notebook:
        notebook.run(
            """
            import pathlib, time
            from notebook_accel import Accelerator, runs, sweep

            def train(lr, steps=2, began=None):
                if began:
                    pathlib.Path(began).touch()
                accelerator = Accelerator(cpu=True)
                for step in range(steps):
                    accelerator.log({"loss": lr / (step + 1)}, step=step)
                    time.sleep(0.05)
                    if accelerator.should_stop:
                        return
            """
        )
        notebook.run('text = {"view": "text", "concurrent": 1}')
        cell = notebook.start('s = sweep(train, {"lr": [0.5, 0.1]}, metric="loss", **text)')
        (output,) = notebook.finish(cell).outputs
        said = notebook.kernel.first[-1]["text/plain"]
        assert said == "sweep of train: starting, which takes some seconds the first time"
        assert (
            "<b>sweep of train: 2 of 2 trials ended, best is trial" in output["data"]["text/html"]
        )
        lines = output["data"]["text/plain"].splitlines()
        assert [line.split()[:5] for line in lines[2:]] == [
            ["1", "✓", "succeeded", "0.1", "0.05"],
            ["0", "✓", "succeeded", "0.5", "0.25"],
        ]
        began = tmp_path / "began"
        given = {"steps": 9999, "began": str(began)}
        long = f's = sweep(train, {{"lr": [1, 2, 3]}}, kwargs={given}, **text)'
        cell = notebook.start(f"before = len(runs())\n{long}")
        eventually(began.exists, within=SOON, what="the first trains")
        notebook.interrupt()
        reply = notebook.finish(cell)
        assert "the sweep was interrupted" in reply.traceback[-1]
        ended = "all(run.state.has_ended for run in runs())"
        assert notebook.run(f"print(len(runs()) - before, {ended})") == "1 True\n"


def test_a_record_that_the_end_of_a_kernel_cut_off_hides_none_that_comes_later():
    folder, ids = SweepFolder(), []
    folder.make()
    for number in range(2):
        run = RunFolder.make()
        run.save(starting(run=run.id, name="train", world_size=1, started=0.0))
        folder.add(run.id, TrialChoice({"lr": number}, {}))
        ids.append(run.id)
        with open(folder.path / "trials.pkl", "ab") as file:
            file.write(b"\x80\x05\x95")
        assert [run_id for run_id, _ in folder.trials()] == ids


SLOW_START = (
    "slow = 'import time; time.sleep(5); from notebook_accel'\n"
    "detached._BOOT = detached._BOOT.replace('from notebook_accel', slow)\n"
    "detached.Channel = type('Dying', (detached.Channel,), {'receive': die})"
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("dying", "pruner"),
    [
        pytest.param("", "optuna.pruners.NopPruner()", id="in a trial"),
        pytest.param("", "None", id="in a trial, without a study", marks=pytest.mark.long),
        pytest.param(
            "detached.wire.Detach = die", "None", id="no call yet", marks=pytest.mark.long
        ),
        pytest.param(SLOW_START, "None", id="its ranks have not begun", marks=pytest.mark.long),
        pytest.param(
            "detached.AttachedCall = die", "None", id="its ranks have begun", marks=pytest.mark.long
        ),
    ],
)
def test_a_detached_sweep_whose_kernel_is_killed_loses_and_repeats_no_trial(
    dying, pruner, tmp_path
):
    began = tmp_path / "began"
    began.touch()
    with open_notebook() as notebook, open_notebook() as other:
        notebook.run(
            f"""
            import optuna, os, pathlib, signal, time
            from notebook_accel import Accelerator, sweep
            from notebook_accel.launch import detached
            folder = pathlib.Path({str(tmp_path)!r})

            def die(*args, **kwargs):
                os.kill(os.getpid(), signal.SIGKILL)

            def train(lr):
                with (folder / "began").open("a") as file:
                    print(lr, file=file)
                accelerator = Accelerator(cpu=True)
                for step in range(20):
                    accelerator.log({{"loss": lr / (step + 1)}}, step=step)
                while lr > 1 and not (folder / f"end of {{lr}}").exists():
                    time.sleep(0.05)
                return lr

            s = sweep(
                train, {{"lr": [3, 2, 1]}}, metric="loss", pruner={pruner}, concurrent=1,
                detach=True, block=False, devices="cpu", view="none",
            )
            while len(s) < 1:
                time.sleep(0.01)
            {textwrap.indent(dying, " " * 12).lstrip()}
            """
        )
        name = notebook.run("print(s.id)").strip()
        (tmp_path / "end of 3").touch()
        if not dying:
            eventually(lambda: began.read_text().count("\n") == 2, within=SOON, what="two began")
            refused = other.fails(f"from notebook_accel import attach; attach({name!r})")
            assert "goes on in the kernel that has it" in refused
            os.kill(notebook.pid, signal.SIGKILL)
        notebook.manager.provisioner.process.wait(SOON)
        (tmp_path / "end of 2").touch()
        shown = other.run(
            f"""
            from notebook_accel import attach
            s = attach({name!r}).wait()
            states = [trial.state.name for trial in s.study.trials] if s.study else []
            # One that was asked for just as the kernel was killed has failed for the study.
            print([run[0] for run in s], s.best[0], [n for n in states if n != "FAIL"])
            """
        )
        states = [] if pruner == "None" else ["COMPLETE"] * 3
        assert shown.endswith(f"[3, 2, 1] 1 {states}\n")
        notebook.expect(0, but=0, within=SOON)  # of what it has launched none comes later
        assert began.read_text().split() == ["3", "2", "1"]
        again = f"s = attach({name!r}).wait(); print(len(s), s.best[0])"
        assert other.run(again).endswith("3 1\n"), "an ended one, too"


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_thousand_trials_leave_the_kernel_as_it_was():
    with open_notebook() as notebook:
        shown = notebook.run(
            """
            import psutil, threading
            from notebook_accel import runs, sweep

            kernel = psutil.Process()

            def stands():
                return kernel.num_fds(), threading.active_count(), kernel.memory_info().rss / 1e6

            def train(number):
                return number

            sweep(train, {"number": [1, 2, 3]}, devices="cpu", view="none")
            before = stands()
            s = sweep(train, {"number": [*range(1000)]}, devices="cpu", concurrent=2)
            assert [run[0] for run in s] == [*range(1000)]
            print(len(runs()), *(now - then for now, then in zip(stands(), before)))
            """,
            timeout=500,
        )
        kept, descriptors, threads, memory = map(float, shown.split()[-4:])
        assert kept == 50
        # zmq begins a thread with its first large message, which has seven.
        assert descriptors <= 3 + 7
        assert threads <= 2 + 1
        assert memory < 100, "MB; the panel's and the handles' of 1,000 runs"
