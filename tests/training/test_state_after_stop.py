"""Stop and Interrupt keep what was being trained."""

import errno
import os
import pickle
import signal
import threading
import time
import warnings
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import notebook_accel
from notebook_accel import Accelerator, NotebookAccelError, RunStopped
from notebook_accel.config import LaunchConfig
from notebook_accel.launch import run_list
from notebook_accel.launch.control import run_folder
from notebook_accel.launch.control.run_folder import RunFolder
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.launcher import Session
from notebook_accel.launch.run import Run, call_of
from notebook_accel.launch.run_list import runs
from notebook_accel.launch.view import View
from notebook_accel.training.precision import AutocastForward
from notebook_accel.training.preparing.state_after_stop import (
    RankPart,
    TensorPiece,
    copy_on_meta,
    fill,
)
from tests.launches import call, on_cpu
from tests.training.harness import skip_unless_it_runs
from tests.training.meshes import Tiny, accelerator_for, data, loss_of
from tests.waiting import eventually

SOON = 90.0
NO_MODELS = "models: the file has state dicts alone; make each model anew and load its weights"


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path))


# Whoever trains has sharded the model before prepare.
GIVEN = "fully_shard, by hand"


def train(mesh, folder):
    """A loop without an end; what it had after each step is on disk."""
    accelerator = accelerator_for(None if mesh == GIVEN else mesh)
    torch.manual_seed(3)
    model = Tiny()
    if mesh == GIVEN:
        fully_shard(model, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    loader = torch.utils.data.DataLoader(data(16), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    step = 0
    while True:
        for inputs, targets in loader:
            accelerator.forward_backward(model, inputs, targets, loss_of)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            state = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                torch.save((step, dict(state)), f"{folder}/{step % 3}")
            # An interrupt comes here, when all ranks have made the same steps.
            if step == 5:
                open(f"{folder}/waits-{accelerator.process_index}", "w").close()
                while not os.path.exists(f"{folder}/go"):
                    time.sleep(0.01)


def begin(mesh, num_ranks, folder):
    run = on_cpu(train, mesh, str(folder), n=num_ranks, grace=SOON, block=False)
    for rank in range(num_ranks):
        eventually((folder / f"waits-{rank}").exists, within=SOON, what="it trains")
    return run


def last_state(folder):
    saved = [torch.load(folder / name) for name in "012"]
    return max(saved, key=lambda each: each[0])


def check_rescued(run, folder, *, has_model):
    step, expected = last_state(folder)
    rescued = run.rescued
    assert rescued.step == step
    assert rescued.missing == ([] if run._results else [NO_MODELS])
    (weights,) = rescued.weights
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
    plain = Tiny()
    plain.load_state_dict(weights)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizer.load_state_dict(rescued.optimizers[0])
    moments = optimizer.state[plain.embed.weight]
    assert moments["step"] == step
    assert moments["exp_avg"].shape == plain.embed.weight.shape
    assert rescued.schedulers[0]["last_epoch"] > 0
    inputs, targets = data(4).tensors
    if has_model:
        (model,) = rescued.models
        assert type(model).__name__ == "Tiny"
        assert model.head.weight is model.embed.weight
        assert torch.equal(model(inputs), plain(inputs))
        loss_of(model(inputs), targets).backward()
    else:
        assert rescued.models == [None]
    loss_of(plain(inputs), targets).backward()
    optimizer.step()


WAYS = {
    "one": (None, 1),
    "ddp": (None, 2),
    "fsdp": ("fsdp, blocks", 2),
    "tensor": ("tensor", 2),
    "pipeline": ("1F1B", 2),
    "given": (GIVEN, 2),
}


@pytest.mark.parametrize("way", ["ddp", "fsdp", "pipeline"])
def test_a_stop_keeps_it(way, tmp_path):
    skip_unless_it_runs(way)
    mesh, num_ranks = WAYS[way]
    run = begin(mesh, num_ranks, tmp_path)
    run.stop()
    (tmp_path / "go").touch()
    with pytest.raises(RunStopped, match=r"is kept: last_run\(\)\.rescued$"):
        run.wait(SOON)
    assert runs()[-1] is run
    assert run.state.notices[-1].endswith("is kept: last_run().rescued")
    check_rescued(run, tmp_path, has_model=mesh != GIVEN)
    assert repr(run.rescued).startswith(f"<Rescued: step {run.rescued.step}, models=[")
    assert len(repr(run.rescued)) < 200, "and no list of weights"
    # As another kernel finds it, which has the state dicts alone.
    elsewhere = run_list._read_run(RunFolder(run.log_dir), View)
    check_rescued(elsewhere, tmp_path, has_model=False)
    file = run.log_dir / "rescued.pt"
    assert file.stat().st_mode & 0o777 == 0o600
    assert torch.load(file, weights_only=True)["step"] == run.rescued.step
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(NotebookAccelError, match=r"rescued\.pt cannot be read"):
        _ = elsewhere.rescued
    file.unlink()
    with pytest.raises(NotebookAccelError, match=r"is gone\. The kernel that launched a run has"):
        _ = elsewhere.rescued


@pytest.mark.parametrize("way", ["one", "tensor", "given"])
def test_an_interrupt_keeps_it(way, tmp_path):
    mesh, num_ranks = WAYS[way]
    run = begin(mesh, num_ranks, tmp_path)
    call_of(run).press(1)
    with pytest.raises(RunStopped, match=r"\.rescued"):
        run.wait(SOON)
    check_rescued(run, tmp_path, has_model=mesh != GIVEN)


class Own:
    """What no file may hold that is read without trusting it."""


def endless(folder, kind="linear"):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    if kind == "unpicklable":
        model.register_forward_hook(lambda *_: None)
        model.lock = threading.Lock()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if kind == "of a class":
        optimizer.param_groups[0]["own"] = Own()
    torch.nn.init.constant_(next(model.parameters()), 7.0)
    optimizer.step()
    open(f"{folder}/waits-0", "w").close()
    while kind != "reads" or not accelerator.should_stop:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (
            "too large",
            r"A restart loses all of it \(0\.0 GB, of which a run's folder takes at most",
        ),
        ("full disk", r"A restart loses all of it \(.*No space left"),
        ("of a class", r"A restart loses all of it \(TypeError: a state dict holds .*Own\)"),
    ],
)
def test_what_is_not_on_disk_is_told(what, why, tmp_path, monkeypatch):
    if what == "too large":
        monkeypatch.setattr(run_folder, "_RESCUED_BYTES", 10)
    if what == "full disk":
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        monkeypatch.setattr(torch, "save", full)
    run = on_cpu(endless, str(tmp_path), what, n=1, grace=SOON, block=False)
    eventually((tmp_path / "waits-0").exists, within=SOON, what="it trains")
    call_of(run).press(1)
    with pytest.raises(RunStopped, match=why):
        run.wait(SOON)
    assert [line for line in run.state.notices if "A restart loses" in line]
    assert run.rescued.models[0].weight.item() == 7.0
    elsewhere = run_list._read_run(RunFolder(run.log_dir), View)
    assert [path.name for path in run.log_dir.glob("rescued*")] == []
    with pytest.raises(NotebookAccelError, match="is gone"):
        _ = elsewhere.rescued


def test_what_the_host_has_no_memory_for_is_left_out(tmp_path):
    """Weights go before the states of optimizers, and one line says what is not kept and why."""
    accelerator = Accelerator(cpu=True)
    inner = torch.nn.Linear(10, 10)
    model, optimizer = accelerator.prepare(inner, torch.optim.Adam(inner.parameters()))
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    weights = 2 * 4 * 110  # a copy here and one in the notebook
    states = 2 * weights + 2 * 2 * 4

    def kept(free):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            part = next(accelerator._prepared.parts_to_rescue(1, free), None)
        return part and part.join([]), [str(one.message) for one in caught]

    whole, told = kept(weights + states)
    assert whole.optimizers[0]["state"]
    assert told == whole.missing == []
    partly, told = kept(weights + states - 1)
    assert partly.models == [inner]
    assert partly.optimizers == [None]
    assert told == partly.missing
    assert "the optimizers' states are not kept: the copies need 0.0 GB of memory" in told[0]
    nothing, told = kept(weights - 1)
    assert nothing is None
    assert "what was being trained is not kept" in told[0]


@pytest.fixture
def session():
    session = Session(LaunchRequest(config=LaunchConfig(num_processes=1, devices="cpu")))
    yield session
    session.kill()


def test_of_calls_of_a_session_too(session, tmp_path):
    def stopped(kind):
        run = call(session, endless, (str(tmp_path), kind), block=False)
        eventually((tmp_path / "waits-0").exists, within=SOON, what="it trains")
        (tmp_path / "waits-0").unlink()
        if kind == "reads":
            run.stop()
        else:
            call_of(run).press(1)
        assert call_of(run).wait(SOON)
        return run

    rescued = stopped("linear").rescued
    assert rescued.models[0].weight.item() == 7.0
    assert rescued.step == 1
    # It cannot travel; its weights do.
    rescued = stopped("unpicklable").rescued
    assert rescued.models == [None]
    assert rescued.weights[0]["weight"].item() == 7.0
    # It ended by itself, and gave what it wanted to.
    assert stopped("reads").rescued is None
    # Nothing is trained any more, and nothing of the calls before is kept.
    run = call(session, time.sleep, (1000,), block=False)
    eventually(lambda: run.status == "running", within=SOON, what="it sleeps")
    call_of(run).press(1)
    with pytest.raises(RunStopped) as caught:
        run.wait(SOON)
    assert run.rescued is None
    assert "rescued" not in str(caught.value)


def test_an_interrupted_cell_says_what_to_type(tmp_path):
    def press_once_it_waits():
        eventually((tmp_path / "waits-0").exists, within=SOON, what="it trains")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_once_it_waits).start()
    with pytest.raises(KeyboardInterrupt, match=r"is kept: last_run\(\)\.rescued$") as caught:
        on_cpu(endless, str(tmp_path), n=1, grace=SOON)
    typed = str(caught.value).partition("is kept: ")[2]
    rescued = eval(typed, {"last_run": notebook_accel.last_run})
    assert rescued.models[0].weight.item() == 7.0
    # The model goes with the handle; its weights are on disk.
    other = Run(call_of(runs()[-1])).rescued
    assert (other.models, other.weights[0]["weight"].item()) == ([None], 7.0)


def test_pieces_that_are_missing_are_told():
    def part(step, *pieces):
        weights = {"a": pieces[0]} if pieces else {}
        return RankPart(models=[None], weights=[weights], optimizers=[], schedulers=[], step=step)

    first, second = (TensorPiece(torch.full((2,), float(i)), (2 * i,), (4,)) for i in range(2))
    whole = part(3, first).join([part(3, second)])
    assert whole.weights[0]["a"].tolist() == [0, 0, 1, 1]
    assert whole.missing == []
    empty = part(3, TensorPiece(torch.ones((0, 2)), (0, 0), (0, 2))).join([])
    assert empty.weights[0]["a"].shape == (0, 2)
    torn = part(3, first).join([])
    assert torn.weights == [None]
    assert "lacks pieces" in torn.missing[0]
    # Interrupted before this rank had prepared a model.
    early = part(3, first).join([replace(part(3), models=[], weights=[])])
    assert early.weights == [None]
    assert early.missing == torn.missing
    other_model = replace(part(3, first), models=[copy_on_meta(torch.nn.Linear(1, 1))])
    kept = other_model.join([part(3, second)])
    assert kept.models == [None]
    assert kept.weights[0].keys() == {"a"}
    assert "model 0: it takes no weights here" in kept.missing[0]


# A model that was spread comes back as it was made.


class OwnHead(nn.Linear):
    """As many modules do, it copies its weights by itself."""

    def _load_from_state_dict(self, state, prefix, *_):
        for name, weight in self.named_parameters():
            weight.data.copy_(state[prefix + name])


class Reader(nn.Module):
    """Tied weights, buffers of both kinds, a weight that is not trained, and torch's own lists."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.recurrent = nn.LSTM(4, 4)
        self.head = OwnHead(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.words = ["a", "b"]

    def forward(self, tokens):
        hidden, _ = self.recurrent(self.norm(self.embed(tokens)) * self.frozen)
        return self.head(hidden) * self.scale

    def load_state_dict(self, state_dict, strict=True):
        return super().load_state_dict(state_dict, strict)  # and no ``assign``


def doubled(_module, _args, outputs):
    return 2 * outputs


def test_it_is_the_model_again_once_it_has_the_weights():
    tokens = torch.tensor([0, 3, 1])
    model = Reader()
    model.register_forward_hook(doubled)
    meta_copy = copy_on_meta(model)
    assert meta_copy is not None
    assert all(weight.is_meta for weight in meta_copy.parameters())
    # What is done to the model from here on, as a strategy does, is nothing to the meta copy.
    cast = AutocastForward(model, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    model.__dict__["forward"] = cast
    model.head.register_forward_hook(doubled)
    model.recurrent = nn.Identity()
    trained = Reader()
    trained.register_forward_hook(doubled)
    trained(tokens)  # moves the averages of the norm
    made = pickle.loads(pickle.dumps(meta_copy))
    fill(made, trained.state_dict())
    assert type(made) is Reader
    assert made.head.weight is made.embed.weight
    assert not made.frozen.requires_grad
    assert made.words == ["a", "b"]
    assert torch.equal(made.eval()(tokens), trained.eval()(tokens))


def test_weights_of_another_kind_and_other_weights_are_refused():
    class Own(nn.Parameter):
        pass

    model = nn.Linear(1, 1)
    meta_copy = copy_on_meta(model)
    assert meta_copy is not None
    with pytest.raises(KeyError):
        fill(meta_copy, {"bias": torch.zeros(1)})
    model.weight = Own(torch.zeros(1, 1))
    assert copy_on_meta(model) is None
