"""Knobs, saves, pauses and stops happen at the same step of all ranks, in real processes."""

import contextlib
import math
import random
import re
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from notebook_accel import (
    Accelerator,
    ConfigError,
    FullyShardedDataParallelPlugin,
    LaunchConfig,
    RunStopped,
    set_seed,
    wire,
)
from notebook_accel.actions import common_actions as actions
from notebook_accel.config.engines import ENGINES
from notebook_accel.launch.run import call_of
from notebook_accel.rank import this_rank
from tests.engines import joined
from tests.launches import launch
from tests.waiting import eventually

SOON = 60.0


def own_steps(has_own):
    """Begin to step an optimizer that one rank has alone; return its step, and what ends a thread.

    The thread steps it as well.
    """
    own, ended = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), threading.Event()

    def step_in_thread():
        while not ended.wait(0.001):
            own.step()

    if not has_own:
        return (lambda: None), ended
    threading.Thread(target=step_in_thread).start()
    return own.step, ended


def train(num_batches, *, fsdp=False, plain=False, folder=None, is_slow=True, num_steps=None):
    """Train by a rate that a knob sets; return what happened at which batch, and the weights.

    With ``plain``, by torch's own DDP, with nothing prepared; rank 0 steps an optimizer of its
    own as well, also in a thread. With ``num_steps``, until so many steps are made.
    """

    set_seed(3)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    size = 2 * num_batches * accelerator.num_processes
    loader = torch.utils.data.DataLoader(torch.randn(size, 8), batch_size=2, shuffle=True)
    if plain:
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    events = []

    def change(rate):
        events.append((batch, "lr", rate))
        for group in optimizer.param_groups:
            group["lr"] = rate

    step_own, ended = own_steps(plain and accelerator.is_main_process)
    batch = 0
    rate = accelerator.knob("lr", 0.01, low=1e-6, high=1.0, log=True, on_change=change)
    start = None if folder is None else accelerator.resume_or_start(folder)
    rates = []
    try:
        for batch, inputs in enumerate(loader, start.batch if start else 0):
            if batch == num_steps:
                break
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step_own()
            rates.append(rate.value)
            if accelerator.should_save:
                events.append((batch, "save", None))
            if is_slow:
                time.sleep(0.002 + 0.003 * accelerator.process_index)
    except RunStopped:
        events.append((batch, "stop", None))
    ended.set()
    weights = model.state_dict() if plain else accelerator.get_state_dict(model)
    return {"events": events, "rates": rates, "weights": weights, "steps": len(rates)}


def start(function, *args, ranks=2, engine="local", **asked):
    config = LaunchConfig(num_processes=ranks, engine=engine)
    return launch(function, args, config=config, **{"block": False, **asked})


def trains(run):
    eventually(lambda: bool(run.state.knobs), what="the knob is known")


def all_train(run):
    """Wait for every rank: a stop that finds one that has counted nothing soon interrupts it."""
    trains(run)
    eventually(lambda: all(rank.batches for rank in run.state.ranks), what="all have batches")


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


CASES = [
    pytest.param("local", 2, {}, 40, id="2 ranks"),
    pytest.param("local", 2, {"plain": True}, 40, id="2 ranks of plain DDP"),
    pytest.param("local", 2, {"fsdp": True}, 200, id="2 ranks of FSDP2", marks=pytest.mark.long),
    pytest.param("local", 4, {}, 200, id="4 ranks", marks=pytest.mark.long),
    pytest.param(joined.NAME, 2, {}, 200, id="2 agents", marks=pytest.mark.long),
    pytest.param(
        joined.NAME, 2, {"plain": True}, 200, id="2 agents, plain", marks=pytest.mark.long
    ),
    pytest.param(joined.NAME, 4, {"fsdp": True}, 200, id="4 agents, FSDP2", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("engine", "num_ranks", "kind", "num_actions"), CASES)
def test_all_ranks_do_random_actions_at_the_same_steps(
    engine, num_ranks, kind, num_actions, monkeypatch
):
    monkeypatch.setitem(ENGINES, joined.NAME, joined.KIND)
    chance = random.Random(num_actions)
    run = start(train, 100_000, ranks=num_ranks, engine=engine, kwargs=kind)
    trains(run)
    rates, num_saves = [], 0
    for _ in range(num_actions):
        kind = chance.choice(["set", "set", "save", "pause"])
        if kind == "set":
            rates.append(chance.uniform(1e-5, 1e-2))
            run.set(lr=rates[-1])
        elif kind == "save":
            run.save()
            num_saves += 1
        else:
            run.pause()
            assert run.status == "paused"
            run.go_on()
            assert run.status == "running"
    run.stop()
    results = run.results
    assert run.status == "stopped"
    first = results[0]["events"]
    assert [one["events"] for one in results] == [first] * num_ranks
    assert [one["rates"] for one in results] == [results[0]["rates"]] * num_ranks
    assert [value for _, kind, value in first if kind == "lr"] == rates
    assert sum(kind == "save" for _, kind, _ in first) == num_saves
    assert first[-1][1] == "stop"
    assert [m["value"] for m in run.metrics if m["name"] == "knob/lr"] == rates


@pytest.mark.parametrize("fsdp", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_training_that_is_paused_ten_times_equals_its_twin(fsdp):
    run = start(train, 100_000, kwargs={"fsdp": fsdp})
    trains(run)
    for number in range(1, 11):
        run.pause()
        steps = re.findall(r"paused \(step ([\d,]+)\)", run.logs(0))
        assert len(steps) == number
        # The newest counts of ranks may come a little later.
        stand = [int(steps[-1].replace(",", "")) + 1] * 2
        eventually(lambda at=stand: batches_of(run) == at, what="all stand at the point")
        time.sleep(0.02)
        assert batches_of(run) == stand
        run.go_on()
    run.stop()
    done = run.wait()[0]["steps"]
    twin = start(train, 100_000, kwargs={"fsdp": fsdp, "is_slow": False, "num_steps": done})
    assert all(same(one["weights"], other["weights"]) for one, other in zip(run, twin, strict=True))


def batches_of(run):
    return [rank.batches for rank in run.state.ranks]


def test_a_paused_run_answers_at_once_is_paused_once_and_ends_by_stop():
    run = start(train, 100_000)
    trains(run)
    for value in ("fast", True, 2.0, float("nan")):
        with pytest.raises(ConfigError, match="lr"):
            run.set(lr=value)
    for asked in [call_of(run).act(wire.Action(kind="pause")) for _ in range(2)]:
        asked.result(SOON)
    assert run.status == "paused"
    run.go_on()
    asked = call_of(run).act(wire.Action(kind="pause"))
    run.go_on()  # as after an interrupt of the cell that waited for the pause
    assert asked.done()
    assert run.status == "running"
    run.pause()
    with pytest.raises(RuntimeError, match=r"save: the run is paused; call run.go_on\(\) first"):
        run.save()
    run.set(lr=0.5)
    run.go_on()
    eventually(lambda: run.state.knobs["lr"].value == 0.5, what="the new rate")
    assert run.status == "running"
    run.save()
    all_train(run)
    with pytest.raises(ConfigError, match=r"rate=1.*no such knob; it has lr"):
        run.set(rate=1)
    run.set(lr=1)
    assert run.state.knobs["lr"].value == 1.0
    run.pause()
    run.set(lr=0.25)  # waits until it goes on, and the run is stopped before that
    run.stop()
    assert [one["events"][-1][1] for one in run.results] == ["stop", "stop"]
    for ask in (run.pause, run.go_on):
        with pytest.raises(RuntimeError, match="has ended"):
            ask()


def test_a_pause_for_which_the_host_has_no_memory_is_refused_and_the_function_acts_where_it_asks():
    def holds_much():
        accelerator = Accelerator(cpu=True)
        this_rank.current()._row.device_memory = 2**50
        accelerator.wait_for_everyone()  # the sum over both is told
        rate, num_saves = accelerator.knob("lr", 0.5), 0  # which the test waits for
        while rate.value == 0.5 or not num_saves:
            num_saves += accelerator.should_save
            time.sleep(0.01)
        return rate.value, num_saves

    run = start(holds_much)
    trains(run)
    with pytest.raises(RuntimeError, match=r"2097152\.0 GB on the devices .* the host, which has"):
        run.pause()
    assert run.status == "running"
    run.set(lr=0.25)
    run.save()
    assert run.results == [(0.25, 1), (0.25, 1)]
    assert run.metrics[0]["step"] > 0
    assert f"lr=0.25 (step {run.metrics[0]['step']:,})" in run.logs(0)


def test_what_meets_no_point_changes_nothing_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(actions, "POINT_SECONDS", 0.5)

    def sleeps(path):
        knob = Accelerator(cpu=True).knob("lr", 0.5)
        while not path.exists():
            time.sleep(0.01)
        return knob.value

    run = start(sleeps, tmp_path / "refused")
    trains(run)
    with pytest.raises(TimeoutError, match=r"common point within 0.5 s.*should_stop"):
        run.set(lr=1)
    (tmp_path / "refused").touch()
    assert run.results == [0.5, 0.5]


def test_a_value_is_kept_for_a_knob_that_is_made_after_a_long_preparation(monkeypatch, tmp_path):
    monkeypatch.setattr(actions, "POINT_SECONDS", 0.2)

    def prepares(path):
        accelerator = Accelerator(cpu=True)
        while not path.exists():
            time.sleep(0.01)
        knobs = [accelerator.knob(name, 0.5) for name in ("lr", "decay", "clip")]
        while [knob.value for knob in knobs] != [1, 2, 3] and not accelerator.should_stop:
            time.sleep(0.001)
        return [knob.value for knob in knobs]

    run = start(prepares, tmp_path / "prepared", timeout=SOON)
    eventually(lambda: run.status == "running", what="the ranks run")
    run.set(lr=1, decay=1)
    run.set(decay=2, clip=2)
    with pytest.raises(TimeoutError, match="save: the ranks did not come"):
        run.save()  # the values have waited for as long, too
    run.set(clip=3)
    (tmp_path / "prepared").touch()
    assert run.results == [[1, 2, 3], [1, 2, 3]]


def test_a_pause_that_one_rank_does_not_come_to_is_given_up(monkeypatch):
    monkeypatch.setattr(actions, "POINT_SECONDS", 0.5)

    def trains_on_rank_0():
        accelerator = Accelerator(cpu=True)
        knob = accelerator.knob("lr", 0.5)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        while accelerator.is_main_process and knob.value:
            optimizer.step()
        accelerator.wait_for_everyone()
        return knob.value

    run = start(trains_on_rank_0)
    eventually(lambda: run.state.ranks[0].steps > 0, what="it trains")
    with pytest.raises(TimeoutError, match=r"^pause: .*training goes on"):
        run.pause()
    assert run.status == "running"
    steps = run.state.ranks[0].steps
    eventually(lambda: run.state.ranks[0].steps > steps, what="rank 0 goes on")
    run.stop()


def test_a_pause_may_take_longer_than_the_way_to_its_point(tmp_path):
    def moves_slowly(folder):
        accelerator, context = Accelerator(cpu=True), this_rank.current()
        plain = context._devices_freed

        @contextlib.contextmanager
        def freed():
            (folder / str(accelerator.process_index)).touch()
            while not (folder / "end").exists():
                time.sleep(0.01)
            with plain():
                yield

        context._devices_freed = freed
        knob = accelerator.knob("lr", 0.5)
        while not accelerator.should_stop:
            time.sleep(0.01)
        return knob.value

    run = start(moves_slowly, tmp_path)
    trains(run)
    pause = call_of(run).act(wire.Action(kind="pause"))
    begun = [tmp_path / str(rank) for rank in range(2)]
    eventually(lambda: all(path.exists() for path in begun), what="both move their state")
    [asked] = call_of(run).actions._line
    asked.due = 0.0  # the time for the way is over
    eventually(lambda: asked.due == math.inf or pause.done(), what="it is known that they do it")
    (tmp_path / "end").touch()
    pause.result(SOON)
    assert run.status == "paused"
    run.go_on()
    run.stop()
    assert run.results == [0.5, 0.5]


@pytest.mark.long
def test_a_stop_is_heard_behind_a_save_that_one_rank_does_not_come_to():
    def trains_on_rank_0():
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        for _ in range(3):
            optimizer.step()
            time.sleep(0.5)
        while accelerator.is_main_process:
            optimizer.step()
        accelerator.wait_for_everyone()

    run = start(trains_on_rank_0)
    eventually(lambda: run.state.ranks[0].steps > 3, what="it trains")
    call_of(run).act(wire.Action(kind="save"))
    eventually(lambda: "save (step" in run.logs(0), what="rank 0 has been there")
    run.stop()
    with pytest.raises(RunStopped):
        run.wait(60)


def test_a_value_that_a_later_knob_refuses_ends_no_training(tmp_path):
    def waits(path):
        accelerator = Accelerator(cpu=True)
        accelerator.knob("width", 3)
        while not accelerator.should_stop and not path.exists():
            time.sleep(0.01)
        return accelerator.knob("lr", 0.1, high=1.0).value

    run = start(waits, tmp_path / "go")
    trains(run)
    with pytest.warns(UserWarning, match=r"no knob lr yet \(it has width\)"):
        run.set(lr=np.int64(5))
    with pytest.raises(ConfigError, match=r"\[1\] was given, and a knob is a number"):
        run.set(rate=[1])
    with pytest.raises(ConfigError, match=r"whole number is expected, as 3 is: 3\.0 takes any"):
        run.set(width=0.5)
    run.set(width=4)  # once the ranks have this, they have the other one
    (tmp_path / "go").touch()
    assert run.results == [0.1, 0.1]
    with pytest.raises(RuntimeError, match="has ended"):
        run.set(rate=1)
    assert "5 is not between -inf and 1; it stays 0.1" in " ".join(run.state.notices)


def validates(folder):
    """Return the batches of the training at which a save is due that a validation has met."""
    accelerator = Accelerator(cpu=True)
    loader, other = accelerator.prepare(*[torch.utils.data.DataLoader(range(8)) for _ in "ab"])
    accelerator.knob("lr", 0.1)
    due = []
    for epoch in range(2):
        for batch, _ in enumerate(loader):
            due += [(epoch, batch) for _ in range(2) if accelerator.should_save]
        while not (folder / "saved").exists():
            (folder / "validates").touch()
            for _ in other:
                time.sleep(0.01)
    return due


def test_a_save_in_a_validation_is_due_at_the_next_step_of_the_training(tmp_path):
    run = start(validates, tmp_path)
    eventually((tmp_path / "validates").exists, within=SOON, what="it validates")
    run.save()
    (tmp_path / "saved").touch()
    assert run.wait().results == [[(1, 0), (1, 0)]] * 2


@pytest.mark.parametrize(("prepares", "num_saves"), [(True, 5), (False, 1)])
def test_a_save_that_rank_0_alone_reads_holds_up_nobody(prepares, num_saves, tmp_path):
    def saves_on_rank_0(num_saves):
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters())
        optimizer = accelerator.prepare(optimizer) if prepares else optimizer
        accelerator.knob("lr", 0.1)
        saved = torch.zeros(1)
        while saved < num_saves:
            accelerator.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            if accelerator.is_main_process:
                time.sleep(0.02)  # the save mostly comes between a step and this read
                saved += accelerator.should_save
            torch.distributed.broadcast(saved, 0)
        return int(saved)

    run = start(saves_on_rank_0, num_saves, timeout=SOON)
    trains(run)
    for _ in range(num_saves):
        call_of(run).act(wire.Action(kind="save", folder=str(tmp_path))).result(SOON)
    assert run.results == [num_saves] * 2


def test_what_is_asked_after_a_stop_is_refused_and_does_not_undo_it():
    run = start(train, 100_000)
    all_train(run)
    run.stop()
    for ask in (run.pause, run.save, partial(run.set, lr=0.5)):
        with pytest.raises(RuntimeError, match=r"is being stopped|has ended"):
            ask()
    assert [[what for _, what, _ in one["events"]] for one in run.wait()] == [["stop"], ["stop"]]


def test_a_range_of_fractions_needs_a_default_that_is_one():
    with pytest.raises(ConfigError, match=r"0\.5 is not; take 0\.0"):
        Accelerator(cpu=True).knob("drop", 0, low=0, high=0.5)
    assert Accelerator(cpu=True).knob("steps", 100, low=1, high=1e4).value == 100


def test_a_checkpoint_is_written_by_itself_and_keeps_the_knob_and_the_log_says_so(tmp_path):
    arguments = {"folder": str(tmp_path)}
    run = start(train, 100_000, kwargs=arguments)
    trains(run)
    run.set(lr=0.125)
    run.save()
    run.pause()
    run.go_on()
    run.stop()
    said = re.findall(r"^notebook_accel: (.*) \(step [\d,]+\)$", run.wait().logs(0), re.MULTILINE)
    assert said == ["lr=0.125", "save", "paused", "goes on"]
    assert "notebook_accel" not in run.logs(1)
    assert all(not [e for e in one["events"] if e[1] == "save"] for one in run)
    assert list(tmp_path.iterdir())
    again = start(train, 100_000, kwargs=arguments)
    all_train(again)
    again.stop()
    assert {rate for one in again for rate in one["rates"]} == {0.125}
