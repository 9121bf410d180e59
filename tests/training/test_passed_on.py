"""Arguments that are handed on reach what they are for: torch's wrappers, loaders, profilers."""

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import accelerate.utils as peer
import pytest
import torch
from accelerate import Accelerator as peer_accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from notebook_accel import (
    Accelerator,
    AutocastKwargs,
    ConfigError,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    NotebookAccelError,
    ProfileKwargs,
    ProjectConfiguration,
    utils,
)
from notebook_accel.training import checkpoint
from notebook_accel.training.collectives import gather_object
from notebook_accel.training.data.samplers import SeedableRandomSampler
from tests.training.harness import on_ranks

INPUTS = torch.ones(3, 4)

# ---- several ranks


@on_ranks(2)
def test_options_of_torchs_wrapper_reach_it():
    options = {
        "static_graph": True,
        "broadcast_buffers": False,
        "bucket_cap_mb": 1,
        "find_unused_parameters": True,
    }
    handlers = [DistributedDataParallelKwargs(**options)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model = accelerator.prepare(nn.Linear(2, 1))
    found = (model.static_graph, model.broadcast_buffers, model.find_unused_parameters)
    assert found == (True, False, True)
    assert model.bucket_bytes_cap == 1 << 20
    # Set later, as Transformers' Trainer does.
    accelerator.ddp_handler = DistributedDataParallelKwargs(bucket_cap_mb=2)
    assert accelerator.prepare(nn.Linear(2, 1)).bucket_bytes_cap == 2 << 20


# From the third step on; weights of 16 x 16 are worth compressing to a rank of 1.
POWER = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"comm_hook": "fp16"},
        {"comm_hook": "power_sgd", "comm_wrapper": "fp16", "comm_state_option": POWER},
    ],
    ids=["fp16", "power_sgd in fp16"],
)
@on_ranks(2)
def test_a_hook_compresses_what_travels_between_ranks(options):
    """Of a model that is prepared, and of one that the user wraps."""
    handler = DistributedDataParallelKwargs(**options)
    by_hand = DistributedDataParallel(nn.Linear(16, 16), **handler.to_kwargs())
    handler.register_comm_hook(by_hand)
    prepared = Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(nn.Linear(16, 16))
    for model in (by_hand, prepared):
        for _ in range(3):
            model.zero_grad()
            model(torch.rand(2, 16)).sum().backward()
        gradients = model.module.weight.grad
        assert torch.equal(gradients.half().float(), gradients)
        assert gather_object([gradients.tolist()]) == [gradients.tolist()] * 2


@pytest.mark.parametrize("hook", utils.DDPCommunicationHookType.list())
def test_hooks_are_those_that_accelerate_registers(hook):
    """Among them bf16, which torch allows over NCCL alone, and batched PowerSGD, whose first
    compression fails in torch 2.13 (it wants a batch of matrices and gives itself one)."""
    registered = []

    def register(state, hook):
        registered.append((hook, getattr(state, "matrix_approximation_rank", None)))

    model = SimpleNamespace(register_comm_hook=register)
    for library in (utils, peer):
        handler = library.DistributedDataParallelKwargs(
            comm_hook=library.DDPCommunicationHookType(hook),
            comm_state_option={"matrix_approximation_rank": 3} if "power" in hook else {},
        )
        handler.register_comm_hook(model)
    assert registered[:1] == registered[1:]
    assert bool(registered) == (hook != "no")


@pytest.mark.parametrize(
    ("rng_types", "seedable"),
    [
        (None, False),
        ([utils.RNGType.TORCH, "generator"], False),
        (["torch"], False),
        (["torch"], True),
    ],
)
@on_ranks(2)
def test_random_numbers_that_ranks_take_from_rank_0(rng_types, seedable):
    config = DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = Accelerator(cpu=True, rng_types=rng_types, dataloader_config=config)
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(8), batch_size=2, shuffle=True))
    order = [number for batch in loader for number in batch.tolist()]
    assert sorted(gather_object(order)) == list(range(8))
    first, second = gather_object([float(torch.rand(()))])
    assert (first == second) == bool(rng_types)


def test_random_numbers_that_a_rank_does_not_have():
    for given in (["torch", "cuda"], ["dice"]):
        with pytest.raises(ConfigError, match=rf"has '{given[-1]}', and this rank, on cpu, has"):
            Accelerator(cpu=True, rng_types=given)


@pytest.mark.parametrize("each", [True, False])
@on_ranks(2)
def test_each_machine_writes_where_it_is_asked_to(each, tmp_path):
    """Each rank is the first of a machine, whose disk no other one sees."""
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    own = tmp_path / f"machine {rank}"
    own.mkdir()
    os.chdir(own)
    checkpoint.start.resolved = Path  # one path, two disks
    project = ProjectConfiguration(save_on_each_node=each)
    accelerator = Accelerator(cpu=True, project_config=project)
    inner = nn.Linear(2, 1)
    model, _ = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    before = inner.weight.tolist()
    told = ""
    try:
        accelerator.save_state("state")
        accelerator.wait_for_checkpoint()
    except NotebookAccelError as error:
        told = str(error)
    accelerator.save_model(model, "weights")
    accelerator.save({"a": 1}, "object.bin")
    utils.save({"a": 1}, "by hand.bin", save_on_each_node=each)
    written = sorted(str(path) for path in Path().glob("**/*") if path.is_file())
    others = [name for name in written if not name.startswith("state")]
    by_rank_0 = ["by hand.bin", "object.bin", "weights/model.safetensors"]
    assert others == (by_rank_0 if each or rank == "0" else [])
    if each:
        of_state = ["model.safetensors", "optimizer.bin", f"random_states_{rank}.pkl"]
        assert sorted(os.listdir("state")) == of_state
        nn.init.zeros_(inner.weight)
        accelerator.load_state("state")
        assert inner.weight.tolist() == before
    elif rank == "1" or told:  # rank 0 says so too, unless it has published before rank 1 came
        assert "is not seen on the machine of rank" in told


# ---- one process


def test_a_profiler_is_built_as_accelerate_builds_it():
    ready = []
    fields = {
        "activities": ["cpu"],
        "schedule_option": {"wait": 0, "warmup": 1, "active": 1, "repeat": 1},
        "on_trace_ready": ready.append,
        "record_shapes": True,
        "profile_memory": True,
        "with_stack": True,
        "with_flops": True,
        "with_modules": True,
    }
    ours, theirs = ProfileKwargs(**fields).build(), peer.ProfileKwargs(**fields).build()
    same = set(fields) - {"schedule_option"}
    for name in same:
        assert getattr(ours, name) == getattr(theirs, name), name
    for step in range(4):
        assert ours.schedule(step) == theirs.schedule(step)
    with pytest.raises(ConfigError, match="activities='gpu': expected one of 'cpu', "):
        ProfileKwargs(activities=["cpu", "gpu"]).build()


HANDLERS = [
    ("AutocastKwargs", {"enabled": False}),
    ("AutocastKwargs", {}),
    ("GradScalerKwargs", {"init_scale": 4.0, "growth_interval": 2000}),
    ("DistributedDataParallelKwargs", {"static_graph": True, "comm_hook": "fp16", "dim": 1}),
    ("DistributedDataParallelKwargs", {"check_reduction": True, "bucket_cap_mb": 25}),
    ("GradientAccumulationPlugin", {"num_steps": 2, "sync_each_batch": True}),
    ("ProfileKwargs", {"with_stack": True, "schedule_option": {"wait": 1}}),
    ("InitProcessGroupKwargs", {"backend": "gloo", "timeout": timedelta(seconds=9)}),
]


@pytest.mark.parametrize(("name", "fields"), HANDLERS)
def test_handlers_give_the_fields_that_accelerates_give(name, fields):
    """Those that differ from the defaults, as arguments for something of torch."""
    ours, theirs = getattr(utils, name)(**fields), getattr(peer, name)(**fields)
    assert isinstance(ours, utils.KwargsHandler)
    assert ours.to_kwargs() == theirs.to_kwargs()
    if name == "DistributedDataParallelKwargs":
        mine, their_fields = (each.to_dict(ignore_keys=["dim"]) for each in (ours, theirs))
        assert mine.keys() == their_fields.keys()
    open_here = {"backend", "timeout", "init_method", "num_steps"}  # other defaults
    mine, their_fields = ours.to_dict(), theirs.to_dict()
    assert mine.keys() == their_fields.keys()
    for field in mine.keys() - (open_here - fields.keys()):
        assert mine[field] == their_fields[field], field


def test_a_projects_folders_move_until_logs_have_one():
    for kind in (ProjectConfiguration, peer.ProjectConfiguration):
        config = kind()
        config.set_directories("a")
        assert (config.project_dir, config.logging_dir) == ("a", "a")
        config.set_directories("b")
        assert (config.project_dir, config.logging_dir) == ("b", "a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"comm_hook": "fp8"}, "comm_hook='fp8': expected one of 'no', 'fp16', 'bf16', 'power"),
        ({"comm_wrapper": "power_sgd"}, "comm_wrapper='power_sgd': expected one of 'no', 'fp1"),
    ],
)
def test_compressions_that_are_not_there(fields, message):
    with pytest.raises(ConfigError, match=message):
        DistributedDataParallelKwargs(**fields)


# What an instance of Accelerate's has and ours has not: its own bookkeeping.
NOT_HERE = {"delayed_fp8_autocast", "flag_tensor", "has_lomo_optimizer"}


def test_attributes_of_an_instance():
    ours, theirs = Accelerator(cpu=True), peer_accelerator(cpu=True)
    names = {name for name in vars(theirs) if not name.startswith("_")}
    assert {name for name in names if not hasattr(ours, name)} == NOT_HERE
    assert ours.rng_types == theirs.rng_types
    for name in names:
        if name.endswith("_handler"):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.deepspeed_config is ours.deepspeed_engine_wrapped is None


class Noting(nn.Linear):
    computed_in: ClassVar[list[torch.dtype]] = []

    def forward(self, inputs):
        outputs = super().forward(inputs)
        self.computed_in.append(outputs.dtype)
        return outputs


def test_what_is_set_on_the_way_holds_from_then_on():
    handlers = [AutocastKwargs(cache_enabled=False), ProfileKwargs(), GradScalerKwargs()]
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers)
    assert accelerator.autocast_handler is handlers[0]
    with accelerator.autocast():
        assert not torch.is_autocast_cache_enabled()
    assert accelerator.profile_handler is handlers[1]
    assert accelerator.scaler_handler is handlers[2]
    model = accelerator.prepare(Noting(4, 1))
    seen = Noting.computed_in
    seen.clear()
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    model(INPUTS)
    accelerator.autocast_handler = None
    model(INPUTS)
    assert accelerator.native_amp
    accelerator.native_amp = False
    model(INPUTS)
    assert seen == [torch.float32, torch.bfloat16, torch.float32]
    accelerator.profile_handler = ProfileKwargs(activities=["cpu"], record_shapes=True)
    with accelerator.profile() as profiler:
        model(INPUTS)
    assert profiler.record_shapes
    accelerator.dataloader_config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    accelerator.rng_types = []
    assert accelerator.rng_types == []
    accelerator.rng_types = ["torch"]
    accelerator.device_placement = accelerator.step_scheduler_with_optimizer = False
    assert accelerator.use_seedable_sampler
    assert not accelerator.native_amp
    loader = accelerator.prepare(DataLoader(range(4), shuffle=True))
    assert isinstance(loader.sampler, SeedableRandomSampler)
    assert (loader.rng_types, loader.device) == (("torch",), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer))
    assert not schedule.step_with_optimizer
    with pytest.raises(ConfigError, match="is a DistributedDataParallelKwargs or None, and a Pro"):
        accelerator.ddp_handler = ProfileKwargs()
    with pytest.raises(ConfigError, match="dataloader_config is a dict"):
        accelerator.dataloader_config = {}
    with pytest.warns(UserWarning, match='native_amp=True has no effect with mixed_precision="no"'):
        Accelerator(cpu=True).native_amp = True
