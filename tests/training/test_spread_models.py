"""Models that the user has spread over the ranks: ``prepare`` takes them as they are.

The loop, its cases and its tolerances are those of ``meshes``; the twin is plain torch.
"""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from notebook_accel import Accelerator
from tests.training import meshes
from tests.training.harness import on_ranks

CASE = {"accumulate": 2, "clip": 0.5, "eps": 0.05}


def fully_sharded(model):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compiled(model):
    return torch.compile(DistributedDataParallel(model), backend="eager")


# What the user did, and what is asked of the Accelerator.
GIVEN = {
    "DDP": (DistributedDataParallel, None, "no"),
    "DDP, compiled": (compiled, None, "no"),
    "fully_shard": (fully_sharded, None, "no"),
    "fully_shard, FSDP plugin": (fully_sharded, "fsdp, blocks", "no"),
    "DDP, FSDP plugin": (DistributedDataParallel, "fsdp, blocks", "no"),
    "DDP, bf16": (DistributedDataParallel, None, "bf16"),
    "fully_shard, bf16": (fully_sharded, None, "bf16"),
}


@pytest.mark.parametrize("name", GIVEN)
@on_ranks(2)
def test_a_model_that_is_spread_trains_as_it_is(name):
    wrap, layout, precision = GIVEN[name]
    case, given = {**CASE, "precision": precision}, []

    def divide(_, model):
        given.append(wrap(model))
        return given[0], torch.optim.AdamW(given[0].parameters(), lr=1e-2, eps=CASE["eps"])

    @contextmanager
    def around(accelerator, *_):
        yield
        inside = accelerator.unwrap_model(given[0], keep_torch_compile=False)
        assert type(inside).__name__ in ("Tiny", "FSDPTiny")
        gradient = next(inside.parameters()).grad
        # fully_shard keeps what is not exchanged elsewhere.
        if not accelerator.sync_gradients and gradient is not None:
            both = accelerator.gather(gradient.flatten()[None])
            assert not torch.equal(both[0], both[1]), "exchanged before the window's end"

    def look(model):
        assert model is given[0]
        return {}

    ours = meshes.train(layout, {**case, "divide": divide, "around": around, "look": look})
    meshes.check_run(ours, meshes.twin(2, case), case)


@on_ranks(2)
def test_the_model_in_a_data_parallel_one_trains_on_all_ranks():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    block = meshes.Block()
    mine = torch.nn.DataParallel(block)
    with warnings.catch_warnings(record=True) as seen:
        model, optimizer = accelerator.prepare(mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    inputs = torch.randn(2, meshes.WIDTH) * (1 + accelerator.process_index)
    accelerator.backward(model(inputs).sum())
    optimizer.step()
    weights = accelerator.gather(torch.cat([weight.flatten() for weight in block.parameters()]))
    assert torch.equal(*weights.chunk(2))
    assert accelerator.unwrap_model(model) is block
    if accelerator.is_main_process:
        [told] = [str(warning.message) for warning in seen]
        assert "the 2 ranks train it" in told
