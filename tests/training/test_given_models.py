"""Models that the user has spread over the ranks: ``prepare`` takes them as they are.

The loop, its cases and its tolerances are those of ``meshes``; the twin is plain torch.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from notebook_accel import Accelerator, GradScalerKwargs
from tests.training.harness import run_ranks
from tests.training.meshes import (
    FLOAT_ERROR,
    Block,
    Tiny,
    blocks,
    check_weights,
    data,
    loss_of,
    make,
    twin,
)

if TYPE_CHECKING:
    from pathlib import Path

CASE: dict[str, Any] = {"accumulate": 2, "clip": 0.5, "eps": 0.05}
ROUNDING = 2.0**-8  # of bf16


def fully_sharded(model: Tiny) -> Tiny:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


# What the user did, and what is asked of the Accelerator.
GIVEN: dict[str, tuple[Any, Any]] = {
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


def train_and_go_on(folder: str) -> dict[str, Any]:
    trained = {name: train(name, f"{folder}/{number}") for number, name in enumerate(GIVEN)}
    return {**trained, "divided": divided_in_fp16()}


def divided_in_fp16() -> dict[str, Any]:
    """Three steps of a model that the user has divided by ``parallelize_module``; in the second an
    overflow in the part of one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    scale = GradScalerKwargs(init_scale=2.0**10)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scale])
    model, _ = make(CASE)
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    mine: Any
    mine, optimizer = accelerator.prepare(model, optimizer)
    inputs, targets = data(4).tensors
    seen: dict[str, Any] = {"losses": [], "skipped": []}
    for number in range(3):
        loss = loss_of(mine(inputs), targets)
        accelerator.backward(loss)
        if number == 1 and accelerator.is_last_process:
            mine.blocks[0].up.weight.grad.to_local().view(-1)[0] = float("inf")
        optimizer.step()
        optimizer.zero_grad()
        seen["losses"].append(loss.item())
        seen["skipped"].append(optimizer.step_was_skipped)
    return seen


def train(name: str, folder: str) -> dict[str, Any]:
    """Two epochs with a checkpoint between; then the second anew, from the checkpoint."""
    wrap, asked = GIVEN[name]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **asked())
    model, _ = make(CASE)
    mine = wrap(model)
    optimizer: Any = torch.optim.AdamW(mine.parameters(), lr=1e-2, eps=CASE["eps"])
    loader: Any = torch.utils.data.DataLoader(data(16), batch_size=2)
    prepared, optimizer, loader = accelerator.prepare(mine, optimizer, loader)
    seen: dict[str, Any] = {"same": prepared is mine, "norms": []}
    losses = epoch(accelerator, prepared, optimizer, loader, seen)
    accelerator.save_state(folder)
    losses += epoch(accelerator, prepared, optimizer, loader, seen)
    state = accelerator.get_state_dict(prepared)
    seen["weights"] = {key: value.tolist() for key, value in state.items()}
    seen["inside"] = type(accelerator.unwrap_model(prepared, keep_torch_compile=False)).__name__
    accelerator.load_state(folder)
    seen["again"] = epoch(accelerator, prepared, optimizer, loader, seen)
    return {**seen, "losses": losses}


def epoch(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, seen: dict[str, Any]
) -> list[float]:
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


def waits(accelerator: Accelerator, model: Any) -> bool:
    """Whether the gradients of this rank are its own still."""
    gradient = next(accelerator.unwrap_model(model).parameters()).grad
    if gradient is None:
        return True  # fully_shard keeps what is not exchanged elsewhere
    both = accelerator.gather(gradient.flatten()[None])
    return not torch.equal(both[0], both[1])


def add_up_in_nested_blocks() -> dict[str, Any]:
    """Which of four backwards of a sharded model reduces, and what they add up to."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(fully_sharded(make(CASE)[0]))
    rank = torch.distributed.get_rank()
    inputs, targets = data(8).tensors
    weight = model.embed.weight
    reduced: list[bool] = []

    def backward(number: int) -> None:
        own = slice(2 * number + rank, 2 * number + rank + 1)
        accelerator.backward(loss_of(model(inputs[own]), targets[own]))
        reduced.append(weight.grad is not None)

    with accelerator.no_sync(model):
        with accelerator.no_sync(model):
            backward(0)
        backward(1)
        with accelerator.trigger_sync_in_backward(model):
            backward(2)
        weight.grad, kept = None, weight.grad.full_tensor()
        backward(3)
    backward(0)
    return {"reduced": reduced, "first": kept.tolist(), "then": weight.grad.full_tensor().tolist()}


def test_blocks_without_reduction_may_lie_in_each_other() -> None:
    def gradient(*batches: int) -> torch.Tensor:
        model = make(CASE)[0]
        inputs, targets = data(8).tensors
        for number in batches:
            own = slice(2 * number, 2 * number + 2)
            loss_of(model(inputs[own]), targets[own]).backward()
        assert model.embed.weight.grad is not None
        return model.embed.weight.grad

    for result in run_ranks(add_up_in_nested_blocks, 2):
        assert result["reduced"] == [False, False, True, False, True]
        for ours, batches in ((result["first"], (0, 1, 2)), (result["then"], (3, 0))):
            torch.testing.assert_close(
                torch.tensor(ours), gradient(*batches), atol=4 * FLOAT_ERROR, rtol=0
            )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train_and_go_on, 2, str(tmp_path_factory.mktemp("given")))


@pytest.mark.parametrize("name", GIVEN)
def test_a_model_that_is_spread_trains_as_it_is(name: str, trained: list[dict[str, Any]]) -> None:
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


def test_layers_that_the_user_divided_train_in_fp16(trained: list[dict[str, Any]]) -> None:
    here, there = (result["divided"] for result in trained)
    assert here == there
    assert here["skipped"] == [False, True, False]
    first, second, third = here["losses"]
    whole = loss_of(make(CASE)[0](data(4).tensors[0]), data(4).tensors[1])
    assert first == pytest.approx(whole.item(), rel=8 * 2.0**-11)
    assert first > second == third


def test_a_data_parallel_model_of_one_process(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    mine: Any = torch.nn.DataParallel(Block())
    optimizer: Any = torch.optim.SGD(mine.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(mine, optimizer)
    assert model is mine
    assert accelerator.unwrap_model(model) is mine.module
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.arange(16.0).reshape(2, 8)).square().sum())
    before = mine.module.up.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, mine.module.up.weight)
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        mine.module.up.weight.zero_()
    accelerator.load_state(tmp_path)
    assert mine.module.up.weight.any()
    assert list(accelerator.get_state_dict(model)) == list(mine.module.state_dict())


def several_copies() -> tuple[bool, list[str]]:
    accelerator = Accelerator(cpu=True)
    mine: Any = torch.nn.DataParallel(Block())
    with warnings.catch_warnings(record=True) as seen:
        prepared = accelerator.prepare(mine)
    return prepared is mine, [str(warning.message) for warning in seen]


def test_a_data_parallel_model_on_several_ranks_is_told() -> None:
    results = run_ranks(several_copies, 2)
    assert [is_same for is_same, _ in results] == [True, True]
    [said] = results[0][1]
    assert "each of the 2 ranks trains a model of its own" in said
