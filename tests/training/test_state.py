"""Where a rank stands: states that are views, groups that stay on this machine, rank by rank."""

import pickle
import socket
import warnings

import accelerate
import pytest
import torch
import torch.distributed as dist

from notebook_accel import (
    Accelerator,
    AcceleratorState,
    ConfigError,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradientState,
    InitProcessGroupKwargs,
    PartialState,
)
from notebook_accel.training.processes import devices, topology
from notebook_accel.training.processes.process_group import close_process_group
from notebook_accel.training.strategies.compiling import DynamoBackend
from tests.training.harness import on_ranks
from tests.training.single import forget_states


def test_a_port_that_another_program_has_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with pytest.raises(ConfigError, match=f"MASTER_PORT={port}.*free one"):
            PartialState(cpu=True)


def test_ranks_that_do_not_know_where_to_meet(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2 but MASTER_ADDR is not set"):
        PartialState(cpu=True)


@on_ranks(2)
def test_a_group_of_the_user_is_used_and_left_alone():
    before = dist.group.WORLD
    accelerator = Accelerator(cpu=True)
    close_process_group()
    pair = dist.new_group([0, 1])
    accelerator.state.destroy_process_group(pair)
    with pytest.raises(ValueError, match="group"):
        dist.get_backend(pair)
    assert dist.group.WORLD is before
    assert (accelerator.num_processes, accelerator.process_index) == (2, dist.get_rank())
    assert accelerator.distributed_type == "MULTI_CPU"
    assert PartialState().backend == "gloo"


def test_states_made_twice_show_the_same():
    first, second = Accelerator(cpu=True, mixed_precision="bf16"), Accelerator(cpu=True)
    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
    assert AcceleratorState().mixed_precision == second.state.mixed_precision == "no"
    assert PartialState().device == AcceleratorState().device == torch.device("cpu")
    second.gradient_accumulation_steps = 4
    assert GradientState().num_steps == 4
    GradientState().sync_gradients = False
    assert second.sync_gradients is False
    assert first.sync_gradients is True, "each Accelerator has windows of its own"
    for state in (PartialState(), AcceleratorState(), GradientState()):
        assert "cpu" in repr(state) or "Sync Gradients: False" in repr(state)
    plugin = GradientAccumulationPlugin(num_steps=2)
    third = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    assert GradientState().plugin_kwargs["num_steps"] == 2
    GradientState().plugin_kwargs.update(num_steps=8)
    assert third.gradient_accumulation_steps == 8
    assert plugin.num_steps == 2
    told = {name: str(value) for name, value in third.state.__dict__.items()}
    assert told.items() >= {"device": "cpu", "num_processes": "1", "mixed_precision": "no"}.items()
    assert pickle.loads(pickle.dumps(third.state)).device == third.device
    forget_states()
    assert [kind._shared_state for kind in (PartialState, AcceleratorState)] == [{}, {}]
    assert (AcceleratorState().mixed_precision, GradientState().num_steps) == ("no", 1)


def test_the_state_shows_the_plugins_of_the_newest_accelerator(monkeypatch):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    compiled = Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_backend="eager").state
    assert compiled.fsdp_plugin is plugin
    assert compiled.dynamo_plugin.backend == DynamoBackend.EAGER
    assert AcceleratorState(mixed_precision="bf16").fsdp_plugin is plugin
    assert compiled.mixed_precision == "bf16"
    assert not compiled.is_fsdp2, "one process has nothing to shard"
    assert AcceleratorState(fsdp_plugin=plugin).fsdp_plugin is plugin
    with pytest.raises(ConfigError, match=r"none with this one: make Accelerator\(fsdp_plugin="):
        AcceleratorState(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    state = Accelerator(cpu=True).state
    names = ["fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "torch_tp_plugin"]
    names += ["parallelism_config", "device_mesh"]
    assert [getattr(state, name) for name in names] == [None] * len(names)
    assert state.dynamo_plugin.backend == DynamoBackend.NO
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "1")
    found = Accelerator(cpu=True).state.fsdp_plugin
    assert isinstance(found, FullyShardedDataParallelPlugin), "the environment asks for it"


def test_a_single_process_needs_no_group():
    accelerator = Accelerator(cpu=True)
    assert not dist.is_initialized()
    assert accelerator.distributed_type == DistributedType.NO == "NO"
    assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
    assert accelerator.is_main_process
    assert accelerator.is_last_process
    assert not accelerator.use_distributed
    accelerator.wait_for_everyone()
    accelerator.end_training()


@pytest.mark.parametrize(
    "make", [PartialState, Accelerator, accelerate.PartialState, accelerate.Accelerator]
)
def test_one_process_does_what_any_rank_is_to_do(make):
    """As in Accelerate: a script that leaves a job to rank 1 does it without launcher, too."""
    state = make(cpu=True)

    def job():
        return "done"

    jobs = [state.on_process(process_index=3)(job), state.on_process(job, process_index=3)]
    jobs += [state.on_local_process(local_process_index=3)(job), state.on_last_process(job)]
    jobs += [state.on_main_process(job), state.on_local_main_process(job)]
    assert [each() for each in jobs] == ["done"] * 6


def test_the_group_s_settings_are_checked_by_name():
    with pytest.raises(TypeError, match="backnd"):
        PartialState(backnd="gloo")
    two = [InitProcessGroupKwargs(), InitProcessGroupKwargs()]
    with pytest.raises(ConfigError, match="two InitProcessGroupKwargs"):
        Accelerator(kwargs_handlers=two)


def test_asking_for_the_cpu_too_late_says_so(monkeypatch):
    monkeypatch.setattr(devices, "choose_device", lambda **_: torch.device("meta"))
    assert PartialState().device.type == "meta"
    with pytest.warns(UserWarning, match="cpu=True came too late"):
        Accelerator(cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accelerator(cpu=True)


def test_a_device_that_the_environment_names(monkeypatch):
    current = []
    gpus = {"is_available": True, "current_accelerator": torch.device("cuda"), "device_count": 2}
    for name, value in gpus.items():
        monkeypatch.setattr(torch.accelerator, name, lambda value=value, **_: value)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    # Names, local rank, and what it gives.
    cases = [("cuda:1", 0, "cuda:1"), ("cuda", 1, "cuda:1"), ("cpu", 1, "cpu"), ("", 0, "cuda:0")]
    for named, rank, expected in cases:
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", named)
        assert str(devices.choose_device(cpu=False, local_rank=rank)) == expected
        assert devices.choose_device(cpu=True, local_rank=rank).type == "cpu"
    assert current == [1, 1, 0]
    for named in ("cuda:2", "xpu", "fast"):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", named)
        with pytest.raises(ConfigError, match=f"'{named}': expected one of 'cpu', 'cuda', 'cpu:0'"):
            devices.choose_device(cpu=False, local_rank=0)


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        (None, "cuda:0", "cpu:gloo,cuda:nccl"),
        ("nccl", "cuda:0", "cpu:gloo,cuda:nccl"),
        ("cuda:nccl", "cuda:0", "cuda:nccl"),  # said device by device
        ("gloo", "cuda:0", "gloo"),
        ("mpi", "cuda:0", "mpi"),
        ("nccl", "cpu", "nccl"),  # torch says what is wrong with it
        (None, "cpu", "gloo"),
    ],
)
def test_a_backend_of_devices_alone_has_gloo_for_the_host_beside_it(
    asked, device, expected, monkeypatch
):
    """Offloaded weights, checkpoints and objects are on the host, and NCCL takes nothing there."""
    opened = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(devices, "choose_device", lambda **_: torch.device(device))
    monkeypatch.setattr(
        topology, "open_process_group", lambda *, backend, **_: opened.append(backend)
    )
    PartialState(backend=asked)
    assert opened == [expected]


@pytest.mark.parametrize("asked", ["true", "false"])
def test_a_rank_stays_near_its_device_if_it_is_asked_to(asked, monkeypatch):
    near = []
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", asked)
    monkeypatch.setattr(devices, "set_numa_affinity", near.append)
    monkeypatch.setattr(devices, "choose_device", lambda **_: torch.device("meta", 1))
    assert PartialState().device.index == 1
    assert near == [1] * (asked == "true")
