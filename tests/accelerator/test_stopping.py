"""Stop and Interrupt where the device runs behind the host, and the hosts of ranks apart."""

import itertools
import time
from pathlib import Path

import pytest
import torch

from notebook_accel import Accelerator, NotebookAccelError, RunStopped
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.run import call_of
from notebook_accel.launch.view import View
from tests.accelerator.ranks import RANKS
from tests.kernel.notebooks import open_notebook
from tests.launches import launch
from tests.waiting import eventually

SOON = 90.0
# What does not end by itself ends after it.
GRACE = 60.0


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Items that depend on the step that uses them: each step takes two on each rank."""

    def __len__(self):
        return 40_000

    def __getitem__(self, index):
        return batch(index // (2 * RANKS))[0]


def batch(step):
    return (torch.arange(16.0).reshape(2, 8) % 2 + step % 7) / 8


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def loss_of(model, inputs):
    return (model(inputs) - 1).square().mean()


def train(way, folder):
    """A loop without an end, in which the host never waits for its device; others are slower."""
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*made())
    batches = (batch(step).to(accelerator.device) for step in itertools.count())
    if way == "loader":
        loader = torch.utils.data.DataLoader(Data(), batch_size=2)
        batches = accelerator.prepare(loader)
    for step, inputs in enumerate(batches):
        accelerator.backward(loss_of(model, inputs))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.04 * accelerator.process_index)
        if step == 10:
            Path(folder, str(accelerator.process_index)).touch()


def begin(function, *args, folder):
    run = launch(
        function,
        (*args, str(folder)),
        config=LaunchConfig(num_processes=RANKS, grace=GRACE),
        view=View(),
        block=False,
    )
    for rank in range(RANKS):
        eventually((folder / str(rank)).exists, within=SOON, what="it trains")
    return run


def check_is_of_one_step(rescued):
    model, optimizer = made()
    for step in range(rescued.step):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.allclose(rescued.weights[0][name], value, atol=1e-5), (rescued.step, name)


@pytest.mark.parametrize("way", ["loader", "steps"])
@pytest.mark.parametrize("press", ["interrupt", "stop"])
def test_the_training_is_kept_where_hosts_run_apart(press, way, tmp_path):
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        run = begin(train, way, folder=folder)
        time.sleep(0.013 * attempt)  # somewhere else in a step
        began = time.monotonic()
        call_of(run).press(1) if press == "interrupt" else run.stop()
        with pytest.raises(RunStopped):
            run.wait(SOON)
        assert time.monotonic() - began < GRACE, "it ends by itself"
        assert run.rescued is not None, run.state.notices
        check_is_of_one_step(run.rescued)
        if way == "loader":
            assert run.rescued.files["loader.bin"]["given"] == run.rescued.step, "a resume's place"


def hang(how, folder):
    """Rank 0 waits for a device that waits for rank 1, whose host does something else."""
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*made())
    for step in itertools.count():
        if step == 10:
            Path(folder, str(accelerator.process_index)).touch()
            while accelerator.process_index:
                time.sleep(0.1)
        loss = loss_of(model, batch(step).to(accelerator.device))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if how == "reads":
            loss.item()
        elif how == "saves" and step == 10:
            try:
                time.sleep(1000)
            except KeyboardInterrupt:
                try:
                    accelerator.save_state(f"{folder}/state")
                except NotebookAccelError as error:
                    Path(folder, "refused").write_text(str(error))
                raise


@pytest.mark.parametrize("how", ["copies", "reads", "saves"])
def test_what_waits_for_a_rank_that_left_is_given_up(how, tmp_path):
    run = begin(hang, how, folder=tmp_path)
    time.sleep(0.5)
    began = time.monotonic()
    call_of(run).press(1)
    with pytest.raises(RunStopped):
        run.wait(SOON)
    assert time.monotonic() - began < GRACE, "it ends by itself, before the grace is over"
    assert run.rescued is None
    assert run.state.notices == (
        "what was being trained is not kept: the ranks were within a step",
    )
    if how == "saves":
        assert "were aborted" in (tmp_path / "refused").read_text(), "what is left is of no step"


def test_a_session_keeps_its_names_and_trains_on(tmp_path):
    loop = """
        %%accelerate
        for step in range(10_000):
            loss = model(torch.ones(2, 4, device=device)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.04 * rank)
            if step == 10:
                open(f"{os.environ['FOLDER']}/{rank}", "w").close()
    """
    with open_notebook({"FOLDER": str(tmp_path)}) as book:
        book.run("%load_ext notebook_accel\nimport os, time, torch, notebook_accel")
        book.run("""
            %%accelerate -n 2
            pid = os.getpid()
            model = torch.nn.Linear(4, 4)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        """)
        pids = book.run("%%accelerate\npid")
        for _ in range(2):
            started = book.start(loop)
            for rank in range(2):
                eventually((tmp_path / str(rank)).exists, within=SOON, what="it trains")
                (tmp_path / str(rank)).unlink()
            book.interrupt()
            assert book.finish(started).status == "error"
            book.run("kept = notebook_accel.last_run().rescued.weights[0]['weight'].sum().item()")
            assert book.run("%%accelerate\npid") == pids
            own = "model.module.weight.sum().item() == kept"
            assert book.run(f"%%accelerate\n{own}") == "ranks 0-1: True\n", "of the step kept"
