"""Models that the user has spread over the ranks: ``prepare`` takes them as they are.

The loop, its cases and its tolerances are those of ``meshes``; the twin is plain torch.
"""

import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from notebook_accel import Accelerator
from tests.training.harness import run_ranks
from tests.training.meshes import (
    FLOAT_ERROR,
    WIDTH,
    Block,
    blocks,
    check_weights,
    data,
    loss_of,
    make,
    twin,
)

CASE = {"accumulate": 2, "clip": 0.5, "eps": 0.05}
ROUNDING = 2.0**-8  # of bf16


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
    "fully_shard, FSDP plugin": (fully_sharded, lambda: {"fsdp_plugin": blocks()}),
    "DDP, FSDP plugin": (DistributedDataParallel, lambda: {"fsdp_plugin": blocks()}),
    "DDP, bf16": (DistributedDataParallel, lambda: {"mixed_precision": "bf16"}),
    "fully_shard, bf16": (fully_sharded, lambda: {"mixed_precision": "bf16"}),
}


def train_and_go_on(folder):
    return {name: train(name, f"{folder}/{number}") for number, name in enumerate(GIVEN)}


def train(name, folder):
    """Two epochs with a checkpoint between; then the second anew, from the checkpoint."""
    wrap, asked = GIVEN[name]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **asked())
    model, _ = make(CASE)
    mine = wrap(model)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2, eps=CASE["eps"])
    loader = torch.utils.data.DataLoader(data(16), batch_size=2)
    prepared, optimizer, loader = accelerator.prepare(mine, optimizer, loader)
    seen = {"same": prepared is mine, "norms": []}
    losses = epoch(accelerator, prepared, optimizer, loader, seen)
    accelerator.save_state(folder)
    losses += epoch(accelerator, prepared, optimizer, loader, seen)
    state = accelerator.get_state_dict(prepared)
    seen["weights"] = {key: value.tolist() for key, value in state.items()}
    seen["inside"] = type(accelerator.unwrap_model(prepared, keep_torch_compile=False)).__name__
    accelerator.load_state(folder)
    seen["again"] = epoch(accelerator, prepared, optimizer, loader, seen)
    return {**seen, "losses": losses}


def epoch(accelerator, model, optimizer, loader, seen):
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen["norms"].append(
                    float(accelerator.clip_grad_norm_(model.parameters(), CASE["clip"]))
                )
            else:
                seen["waits"] = waits(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def waits(accelerator, model):
    """Whether the gradients of this rank are its own still."""
    gradient = next(accelerator.unwrap_model(model).parameters()).grad
    if gradient is None:
        return True  # fully_shard keeps what is not exchanged elsewhere
    both = accelerator.gather(gradient.flatten()[None])
    return not torch.equal(both[0], both[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run_ranks(train_and_go_on, 2, str(tmp_path_factory.mktemp("given")))


@pytest.mark.parametrize("name", GIVEN)
def test_a_model_that_is_spread_trains_as_it_is(name, trained):
    rounding = ROUNDING if "bf16" in name else 0.0
    expected = twin(2, {**CASE, "precision": "bf16"} if rounding else CASE)
    # AdamW moves a weight by twice lr / eps of a gradient's error; gradients are clipped to 0.5.
    error, moved = 20 * FLOAT_ERROR + 8 * rounding, 20 * FLOAT_ERROR + 4 * rounding * 0.2
    for result in trained:
        ours = result[name]
        assert ours["same"]
        assert ours["waits"]
        assert ours["inside"] in ("Tiny", "FSDPTiny")
        assert ours["losses"] == pytest.approx(expected["losses"], abs=error)
        norms = ours["norms"][: len(expected["norms"])]
        assert norms == pytest.approx(expected["norms"], rel=1e-5 + 16 * rounding)
        assert ours["again"] == pytest.approx(expected["losses"][4:], abs=error)
        check_weights(ours["weights"], expected["weights"], moved)


def train_in_data_parallel():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    block = Block()
    mine = torch.nn.DataParallel(block)
    with warnings.catch_warnings(record=True) as seen:
        model, optimizer = accelerator.prepare(mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    accelerator.backward(model(torch.randn(2, WIDTH) * (1 + accelerator.process_index)).sum())
    optimizer.step()
    weights = accelerator.gather(torch.cat([weight.flatten() for weight in block.parameters()]))
    is_same = torch.equal(*weights.chunk(2))
    told = [str(warning.message) for warning in seen]
    return accelerator.unwrap_model(model) is block, is_same, told


def test_the_model_in_a_data_parallel_one_trains_on_all_ranks():
    results = run_ranks(train_in_data_parallel, 2)
    assert [(is_block, is_same) for is_block, is_same, _ in results] == [(True, True)] * 2
    [said] = results[0][2]
    assert "the 2 ranks train it" in said
