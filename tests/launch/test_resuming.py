"""Launches that go on from where a run was stopped, or from a checkpoint, in real processes."""

import time
from pathlib import Path

import pytest
import torch

from notebook_accel import (
    Accelerator,
    ConfigError,
    FullyShardedDataParallelPlugin,
    LaunchConfig,
    PartialState,
    RunStopped,
    WorkerError,
    set_seed,
)
from notebook_accel.launch.launcher import folder_to_resume
from notebook_accel.launch.run import call_of
from tests.launches import launch
from tests.waiting import eventually

SOON = 60.0
NUM_BATCHES = 30


def train(rate=0.01, *, width=16, told=None, fsdp=False, own=None):
    """Train two epochs with all that a checkpoint has; return the losses and rates of each step.

    With ``told``, each step is logged, and the tenth waits until somebody has made this file.
    """

    set_seed(3)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    data = torch.randn(2 * NUM_BATCHES * accelerator.num_processes, 8)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    start = None if own is None else accelerator.resume_or_start(own)
    losses, rates = [], []
    for epoch in range(start.epoch if start else 0, 2):
        for inputs in loader:
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
            if told is not None:
                accelerator.log({"loss": losses[-1]}, step=len(losses))
                while len(losses) >= 10 and not told.exists():
                    time.sleep(0.01)
                # The stop that comes after some steps is to find the first epoch.
                time.sleep(0.03 if len(losses) < 10 else 0.3)
        if epoch == 0 and own and not start.step:
            accelerator.save_state()
    return {"losses": losses, "rates": rates, "start": start}


def start(*args, function=train, ranks=2, **asked):
    return launch(function, args, config=LaunchConfig(num_processes=ranks), **asked)


def stopped(folder, **kwargs):
    told = folder / "told"
    run = start(block=False, kwargs={"told": told, **kwargs})
    eventually(lambda: run.state.ranks[0].steps > 5, what="some steps")
    run.stop()
    told.touch()
    assert run.results == [None, None]
    assert run.status == "stopped"
    return run


@pytest.mark.parametrize(
    "fsdp", [False, pytest.param(True, marks=pytest.mark.long)], ids=["ddp", "fsdp"]
)
def test_a_stopped_run_goes_on_to_the_bit(fsdp, tmp_path):
    whole = start(kwargs={"fsdp": fsdp}).results
    run = stopped(tmp_path, fsdp=fsdp)
    done = run.state.ranks[0].steps
    again = start(kwargs={"fsdp": fsdp}, resume=folder_to_resume(run))
    for one, other in zip(again.results, whole, strict=True):
        # Epochs count anew: what is left of the first, and two more.
        rest = NUM_BATCHES - done
        assert one["losses"][:rest] == other["losses"][done:NUM_BATCHES]
        assert one["losses"][: rest + NUM_BATCHES] == other["losses"][done:]
        assert one["rates"][: rest + NUM_BATCHES] == other["rates"][done:]
    notices = [one for one in again.state.notices if "goes on from" in one]
    assert len(notices) == 1
    assert f"step {done}" in notices[0]
    assert f"at batch {done}" in notices[0]


class Waiting(torch.optim.SGD):
    """Waits in its seventh step, in which one of its two weights has made it."""

    folder = ""

    def step(self, closure=None):
        if Waiting.folder:
            self.param_groups[1]["lr"] = 0.0
        result = super().step(closure)
        if Waiting.folder:
            wait_for_the_interrupt(Waiting.folder)
        return result


def wait_for_the_interrupt(folder):
    Path(folder, str(PartialState().process_index)).touch()
    time.sleep(1000)


def step_by_step(folder, where="", num_accumulated=1):
    """Train two epochs with a test in each; return the losses. Waits where an interrupt comes."""

    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_accumulated)
    model = torch.nn.Linear(8, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = Waiting(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    data = torch.randn(2 * NUM_BATCHES * accelerator.num_processes, 8)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    others = torch.utils.data.DataLoader(data[:8], batch_size=2)
    model, optimizer, loader, others, schedule = accelerator.prepare(
        model, optimizer, loader, others, schedule
    )
    losses = []
    for _ in range(2):
        for number, inputs in enumerate(loader):
            with accelerator.accumulate(model):
                comes = number == 6 and where
                if comes == "forward":
                    wait_for_the_interrupt(folder)
                loss = model(inputs).square().mean()
                accelerator.backward(loss)
                if comes == "backward":
                    wait_for_the_interrupt(folder)
                if comes == "step":
                    Waiting.folder = folder
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            for _ in others:
                if comes == "test":
                    wait_for_the_interrupt(folder)
    return losses


def interrupted(folder, *args):
    run = start(str(folder), *args, function=step_by_step, block=False)
    for rank in range(2):
        eventually((folder / str(rank)).exists, what="it waits")
    call_of(run).press(1)
    with pytest.raises(RunStopped):
        run.wait(SOON)
    return run


@pytest.mark.parametrize(
    ("where", "num_accumulated", "done", "steps"),
    [("forward", 1, 6, 6), ("backward", 1, 6, 6), ("test", 1, 7, 7), ("forward", 4, 4, 1)],
)
def test_an_interrupted_run_goes_on_after_its_last_step(
    where, num_accumulated, done, steps, tmp_path
):
    asked = {"function": step_by_step}
    whole = start(str(tmp_path), "", num_accumulated, **asked)
    run = interrupted(tmp_path, where, num_accumulated)
    assert run.rescued.step == steps
    assert run.rescued.missing == []
    again = start(str(tmp_path), "", num_accumulated, resume=folder_to_resume(run), **asked)
    for one, other in zip(again.results, whole.results, strict=True):
        assert len(one) == 2 * NUM_BATCHES - done
        assert one[:NUM_BATCHES] == other[done:][:NUM_BATCHES]
    inexact, goes_on = again.state.notices
    assert f"(step {steps}). " in goes_on
    assert f"begins at batch {done}: " in goes_on
    assert "is of an interrupt: what is drawn from now on (dropout, augmentation)" in inexact


def test_an_interrupt_within_a_step_is_told(tmp_path):
    run = interrupted(tmp_path, "step")
    torn = "within step 7, which some weights may have made and others not"
    assert run.rescued.step == 6
    assert run.rescued.missing == [f"weights: the interrupt came {torn}"]
    again = start(str(tmp_path), function=step_by_step, resume=folder_to_resume(run))
    assert f"is of an interrupt {torn}: " in again.state.notices[0]
    assert "begins at batch 6: " in again.state.notices[1]


def test_a_new_rate_wins_and_the_schedule_keeps_its_place(tmp_path):
    run = stopped(tmp_path, own=str(tmp_path / "first"))
    done = run.state.ranks[0].steps
    asked = {"kwargs": {"own": str(tmp_path / "second")}, "resume": folder_to_resume(run)}
    again = start(0.001, **asked)
    for one in again:
        assert one["start"].step == one["start"].batch == done
        assert len(one["losses"]) == 2 * NUM_BATCHES - done
        expected = [0.001 * 0.81**step for step in range(done + 1, 2 * NUM_BATCHES + 1)]
        assert one["rates"] == pytest.approx(expected)


def test_the_newest_checkpoint_of_a_run_or_a_folder_goes_before_the_functions_own(tmp_path):
    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    run = start(kwargs={"own": own})
    assert folder_to_resume(run) == run.state.checkpoint == f"{own}/checkpoint_0"
    start(kwargs={"own": other})
    again = start(kwargs={"own": other}, resume=folder_to_resume(own))
    for one, whole in zip(again, run, strict=True):
        assert one["start"].folder == f"{own}/checkpoint_0"
        assert one["losses"] == whole["losses"][NUM_BATCHES:]


def test_shapes_that_differ_are_named_and_nothing_is_loaded(tmp_path):
    run = start(kwargs={"own": str(tmp_path)})
    with pytest.raises(WorkerError) as caught:
        start(kwargs={"width": 8}, resume=folder_to_resume(run))
    text = str(caught.value)
    assert "nothing was loaded" in text
    assert "size mismatch for 0.weight: (16, 8) there, (8, 8) in the model" in text


def test_what_cannot_be_gone_on_from_is_refused(tmp_path):
    run = start()
    for source, words in [
        (run, "It wrote no checkpoint"),
        (str(tmp_path), r"no checkpoint of an Accelerator in it \(a Trainer goes on from its own"),
        (tmp_path / "none", "no such folder"),
        (3, "expected a run"),
    ]:
        with pytest.raises(ConfigError, match=words):
            folder_to_resume(source)


def test_a_training_that_prepared_nothing_is_not_cloned_warm():
    def own_loop():
        accelerator = Accelerator(cpu=True)
        while not accelerator.should_stop:
            time.sleep(0.001)

    run = start(function=own_loop, ranks=1, block=False)
    with pytest.raises(ConfigError, match=r"own_loop has prepared no model.*A Trainer's or"):
        run.clone(warm=True)
    run.stop()
    run.wait()


def keep_own_file(models, weights, folder):
    weights.clear()
    torch.save(models[0].state_dict(), f"{folder}/own.pt")


def learn(rate=0.01, folder="", has_hooks=False, **others):
    """Train until a knob says so; return the loss before each step, and where it began."""

    set_seed(3)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = torch.utils.data.DataLoader(torch.randn(400_000, 8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if has_hooks:
        accelerator.register_save_state_pre_hook(keep_own_file)
        accelerator.register_load_state_pre_hook(
            lambda models, folder: models.pop().load_state_dict(torch.load(f"{folder}/own.pt"))
        )
    pause = accelerator.knob("pause", 0.01, low=0.0, high=1.0)
    steps = accelerator.knob("steps", 100_000)
    start = accelerator.resume_or_start(folder) if folder else None
    losses = []
    for inputs in loader:
        if len(losses) >= steps.value:
            break
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        time.sleep(pause.value)
    return {"losses": losses, "start": start, "rate": rate, "pause": pause.value, **others}


def learning(**kwargs):
    run = start(function=learn, kwargs=kwargs, block=False)
    eventually(lambda: run.state.ranks[0].steps > 5, what="some steps")
    return run


def test_a_clone_begins_warm_from_a_live_run_and_both_go_on(tmp_path):
    run = learning(folder=str(tmp_path))
    run.pause()
    with pytest.raises(ConfigError, match=r"^learn is paused: run\.go_on"):
        run.clone(warm=True)
    run.go_on()
    other = run.clone(warm=True, rate=0.001, pause=0.0, steps=10, tag="new")
    assert other.name.startswith("rate=0.001")
    assert run.status == "running"
    first = other[0]
    assert (first["rate"], first["pause"], first["tag"]) == (0.001, 0.0, "new")
    begun = first["start"].step
    assert begun > 5
    run.set(pause=0.0)
    eventually(lambda: run.state.ranks[0].steps > begun + 20, what="the original")
    run.stop()
    assert run.results == [None, None]
    # What it had at that step is what the clone began with: the losses of one step agree.
    again = run.clone(warm=True, steps=3)
    assert again.wait()[0]["start"].step == run.state.ranks[0].steps
    twin = start(function=learn, kwargs={"pause_": 0}, knobs={"steps": begun + 1})
    assert twin[0]["losses"][begun] == first["losses"][0]


def test_save_now_saves_a_function_that_does_not_ask_and_a_launch_goes_on_from_it():
    run = learning()
    with pytest.raises(ConfigError, match=r"run\.stop\(\) it, or run\.save\(\)"):
        folder_to_resume(run)
    run.save()
    eventually(lambda: run.state.notices, what="the line that says where")
    saved = str(run.log_dir / "saved")
    assert run.state.notices == (f"saved in {saved}",)
    done = run.state.ranks[0].steps
    run.save()  # replaces it
    assert folder_to_resume(run) == saved
    again = start(function=learn, kwargs={"folder": saved}, knobs={"steps": 1}, resume=saved)
    assert again[0]["start"].step >= done > 5
    run.set(steps=1)
    assert run.wait().status == "succeeded"


def test_what_a_stop_left_is_loaded_without_hooks_that_no_save_has_called():
    run = learning(has_hooks=True)
    run.stop()
    assert run.results == [None, None]
    asked = {"function": learn, "knobs": {"steps": 1}, "resume": folder_to_resume(run)}
    first, second = (start(kwargs={"has_hooks": hooks}, **asked) for hooks in (True, False))
    assert first[0]["losses"] == second[0]["losses"]
    assert "load hooks are not called" in " ".join(first.state.notices)
    assert "hooks" not in " ".join(second.state.notices)


def test_a_cold_clone_is_the_same_call_and_bad_names_start_nothing():
    run = learning()
    run.stop()
    clone = run.clone(block=True, rate=0.5, steps=4)
    assert clone[1]["rate"] == 0.5
    assert len(clone[1]["losses"]) == 4
    for error, words, changes in [
        (ConfigError, "not between 0 and 1", {"pause": 3.0}),
        (ConfigError, "expected", {"steps": "many"}),
    ]:
        with pytest.raises(error, match=words):
            run.clone(**changes)

    def plain(lr):
        Accelerator(cpu=True).knob("lr", lr)

    def several(first, *others, **named):
        return first, others, named

    varied = start(1, 2, 3, function=several, ranks=1)
    assert varied.clone(block=True, first=9, more=4)[0] == (9, (2, 3), {"more": 4})
    small = start(1.0, function=plain, ranks=1)
    with pytest.raises(ConfigError, match="an argument of the function and one of its knobs"):
        small.clone(lr=2.0)
    with pytest.raises(TypeError, match="neither an argument nor a knob"):
        small.clone(rl=2.0)
    with pytest.raises(ConfigError, match=r"^plain left nothing to go on from"):
        small.clone(warm=True)
