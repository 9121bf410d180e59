"""What only a machine with a GPU can show; skipped elsewhere.

Run them there with: make test-gpu
"""

import os
from pathlib import Path

import psutil
import pytest
import torch

from notebook_accel import Accelerator, ConfigError, LaunchConfig, WorkerError, notebook_launcher
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.launcher import Session
from tests.launches import call

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two GPUs")


def _num_gpus():
    return torch.accelerator.device_count()


def _train(steps):
    """Train a small model on data that depends on nothing but the step; gives what it saw."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(steps):
        inputs = torch.linspace(-1, 1, 32 * 8).reshape(32, 8).roll(step, 0).to(accelerator.device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return {
        "device": str(accelerator.device),
        "world": accelerator.num_processes,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "losses": losses,
        "model": accelerator.unwrap_model(model),
    }


def test_one_rank_a_gpu_by_default_and_weights_come_back_to_the_cpu(kind):
    run = notebook_launcher(_train, (5,), view="none")
    assert len(run) == _num_gpus()
    assert [result["device"] for result in run] == [f"{kind}:{rank}" for rank in range(len(run))]
    assert {str(p.device) for p in run[0]["model"].parameters()} == {"cpu"}
    assert all(rank.device_memory for rank in run.state.ranks)


def test_a_kernel_that_uses_its_gpu_launches_again_and_again(kind):
    ours = torch.ones(1000, device=kind)
    for _ in range(2):
        run = notebook_launcher(_train, (2,), num_processes=1, view="none")
        assert run[0]["device"] == f"{kind}:0"
    assert float(ours.sum()) == 1000.0


@pytest.mark.real_gpu
def test_more_ranks_than_gpus_is_refused_unless_they_share_by_gloo():
    too_many = _num_gpus() + 1
    with pytest.raises(ConfigError, match=f"num_processes={too_many}"):
        notebook_launcher(_train, (1,), num_processes=too_many, view="none")
    run = notebook_launcher(
        _train, (3,), num_processes=too_many, config=LaunchConfig(backend="gloo"), view="none"
    )
    assert {result["backend"] for result in run} == {"gloo"}
    assert run[0]["losses"] == pytest.approx(run[1]["losses"])


@needs_two
def test_two_ranks_meet_by_the_backend_of_the_device(kind):
    run = notebook_launcher(_train, (2,), num_processes=2, view="none")
    assert torch.distributed.get_default_backend_for_device(kind) in run[0]["backend"]
    assert run[0]["losses"] == run[1]["losses"]


def _meet(raises):
    """Where rank 0 raises, rank 1 waits for it on its device."""
    accelerator = Accelerator()
    one = torch.ones(1, device=accelerator.device)
    assert float(accelerator.reduce(one, "sum")) == 2, "NCCL has its connections"
    if raises and accelerator.is_main_process:
        raise ValueError("bad batch")
    return accelerator.process_index, float(accelerator.reduce(one, "sum"))


@needs_two
def test_ranks_of_a_session_survive_one_that_raises_while_others_wait_on_their_gpus():
    session = Session(LaunchRequest(config=LaunchConfig(num_processes=2)))
    try:
        pids = call(session, os.getpid).results
        for _ in range(2):
            with pytest.raises(WorkerError, match="bad batch"):
                call(session, _meet, (True,))
            assert call(session, _meet, (False,)).results == [(0, 2.0), (1, 2.0)]
        assert call(session, os.getpid).results == pids
    finally:
        session.close()


def _queue_alone():
    accelerator = Accelerator()
    one = torch.ones(1, device=accelerator.device)
    accelerator.reduce(one)
    if accelerator.is_main_process:
        torch.distributed.all_reduce(one)
    return accelerator.process_index


@needs_two
def test_a_run_ends_although_a_rank_has_queued_what_no_other_has():
    run = notebook_launcher(_queue_alone, num_processes=2, timeout=60, view="none")
    assert run.results == [0, 1]


def test_chosen_devices(monkeypatch):
    last = _num_gpus() - 1
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run = notebook_launcher(_visible, devices=[last], view="none")
    assert run.results == [(str(last), 1)]
    run = notebook_launcher(_train, (1,), num_processes=1, devices="cpu", view="none")
    assert run[0]["device"] == "cpu"


def _visible():
    return os.environ["CUDA_VISIBLE_DEVICES"], torch.accelerator.device_count()


def _open_devices(pid="self"):
    folder = Path("/proc", str(pid), "fd")
    paths = [os.readlink(path) for path in folder.iterdir() if path.is_symlink()]
    return [path for path in paths if path.startswith("/dev/nvidia")]


def _choose_in_the_function():
    before = _open_devices()
    of_template = _open_devices(psutil.Process(os.getppid()).ppid())
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    torch.cuda.init()
    return before, of_template, torch.cuda.device_count()


@pytest.mark.real_gpu
def test_no_device_is_used_before_the_function_does():
    run = notebook_launcher(_choose_in_the_function, num_processes=1, view="none")
    assert run.results == [([], [], 1)]


def _tf32():
    return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()


@pytest.mark.real_gpu
def test_tf32_of_the_notebook_reaches_the_ranks(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        run = notebook_launcher(_tf32, num_processes=1, view="none")
    finally:
        torch.set_float32_matmul_precision(before)
    assert run.results == [(False, "high")]


def test_tensors_of_the_notebook_on_a_gpu_arrive_on_the_cpu_with_a_line(kind):
    weights = torch.arange(4.0, device=kind)

    def train():
        return str(weights.device), weights.to(kind) * 2

    run = notebook_launcher(train, num_processes=1, view="none")
    device, doubled = run[0]
    assert device == "cpu"
    assert doubled.device.type == "cpu"
    assert doubled.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert any("CPU" in notice for notice in run.state.notices)


@pytest.mark.real_gpu
def test_a_failing_rank_leaves_no_memory_on_the_gpu():
    def train():
        held = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
        raise ValueError(f"holding {held.numel()}")

    torch.cuda.init()
    free_before, _ = torch.cuda.mem_get_info()
    with pytest.raises(WorkerError, match="holding"):
        notebook_launcher(train, num_processes=1, view="none")
    free_after, _ = torch.cuda.mem_get_info()
    assert free_before - free_after < 64 << 20
