"""Models that the user has spread over the ranks: ``prepare`` takes them as they are.

The loop, its cases and its tolerances are those of ``meshes``; the twin is plain torch.
"""

import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from notebook_accel import Accelerator
from tests.training import meshes
from tests.training.harness import on_ranks

CASE = {"accumulate": 2, "clip": 0.5, "eps": 0.05}


def fully_sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# What the user did, and what is asked of the Accelerator.
GIVEN = {
    "DDP": (DistributedDataParallel, dict),
    "DDP, compiled": (
        lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
        dict,
    ),
    "fully_shard": (fully_sharded, dict),
    "fully_shard, FSDP plugin": (fully_sharded, lambda: {"fsdp_plugin": meshes.blocks()}),
    "DDP, FSDP plugin": (DistributedDataParallel, lambda: {"fsdp_plugin": meshes.blocks()}),
    "DDP, bf16": (DistributedDataParallel, lambda: {"mixed_precision": "bf16"}),
    "fully_shard, bf16": (fully_sharded, lambda: {"mixed_precision": "bf16"}),
}


def epoch(accelerator, model, optimizer, loader):
    """Losses of the batches, and norms of the windows."""
    losses, norms = [], []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = meshes.loss_of(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), CASE["clip"])
                norms.append(float(norm))
            else:
                assert waits(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses, norms


def waits(accelerator, model):
    """Whether the gradients of this rank are its own still."""
    gradient = next(accelerator.unwrap_model(model).parameters()).grad
    if gradient is None:
        return True  # fully_shard keeps what is not exchanged elsewhere
    both = accelerator.gather(gradient.flatten()[None])
    return not torch.equal(both[0], both[1])


@pytest.mark.parametrize("name", GIVEN)
@on_ranks(2)
def test_a_model_that_is_spread_trains_as_it_is(name, tmp_path):
    """Two epochs with a checkpoint between; then the second anew, from the checkpoint."""
    wrap, asked = GIVEN[name]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **asked())
    mine = wrap(meshes.make(CASE)[0])
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2, eps=CASE["eps"])
    loader = torch.utils.data.DataLoader(meshes.data(16), batch_size=2)
    model, optimizer, loader = accelerator.prepare(mine, optimizer, loader)
    assert model is mine
    inside = accelerator.unwrap_model(model, keep_torch_compile=False)
    assert type(inside).__name__ in ("Tiny", "FSDPTiny")
    ready = accelerator, model, optimizer, loader
    first = epoch(*ready)
    accelerator.save_state(tmp_path)
    second = epoch(*ready)
    weights = meshes.weights_of(accelerator, model)
    accelerator.load_state(tmp_path)
    again, _ = epoch(*ready)

    precision = accelerator.mixed_precision
    expected, rounding = (
        meshes.twin(2, {**CASE, "precision": precision}),
        meshes.ROUNDING[precision],
    )
    losses, norms = (one + other for one, other in zip(first, second, strict=True))
    error = 20 * meshes.FLOAT_ERROR + 8 * rounding
    assert losses == pytest.approx(expected["losses"], abs=error)
    assert norms == pytest.approx(expected["norms"], rel=1e-5 + 16 * rounding)
    assert again == pytest.approx(expected["losses"][4:], abs=error)
    # AdamW moves a weight by twice lr / eps of a gradient's error; gradients are clipped to 0.5.
    moved = 20 * meshes.FLOAT_ERROR + 4 * rounding * 0.2
    meshes.check_weights(weights, expected["weights"], moved)


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
