"""Every strategy x precision x accumulation equals one process: losses, norms, weights, samples.

The twin is plain torch: one process, batches of all shares together, autocast and a loss scaler of
torch. The loop is the same under every strategy, and does at once what users do: two models, each
with embedding and head tied and an optimizer made before ``prepare``, data that does not divide
evenly, clipping by norm at the end of each window, samples gathered for a metric.

Tolerances. In float32 the same products are added up in another order: some 1e-6 a step (see
``meshes``). In bf16 and fp16 each product is rounded, relatively by 2**-8 or 2**-11, and in other
places than the twin's: ranks round the gradients of their own shares, stages those of their
micro-batches, ``fully_shard`` the weights themselves. So a loss of order 1 may move by a few
roundings, and a weight by as much of the path that it went: steps times the learning rate, since
gradients are clipped to norm 1 and SGD has no memory here.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, GradScalerKwargs, ParallelismConfig
from tests.training.harness import run_ranks
from tests.training.meshes import FLOAT_ERROR, MESHES, Block, Tiny, data, loss_of, plugin

ROUNDING = {"no": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A scale at which nothing overflows: steps that are skipped have tests of their own.
SCALE = {"init_scale": 2.0**10}
CASES = [(precision, window) for precision in ROUNDING for window in (1, 2)]
SAMPLES, BATCH, EPOCHS, RATE = 13, 4, 2, 0.2


class Deep(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block(), Block()])


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def asked_for(sizes: dict[str, int], **plugin_fields: Any) -> Any:
    asked: dict[str, Any] = {"parallelism_config": ParallelismConfig(**sizes, tp_plan=PLAN)}
    return asked | ({"fsdp_plugin": plugin(**plugin_fields)} if plugin_fields else {})


# name: ranks, shares of the data, what the user asks for (made on the rank)
STRATEGIES: dict[str, tuple[int, int, Any]] = {
    "single": (1, 1, dict),
    "replicas": (2, 2, dict),
    **{name: MESHES[name] for name in ("fsdp, blocks", "tensor")},
    **{name: MESHES[name] for name in ("fsdp x tensor", "replicas x fsdp")},
    "pipeline": (2, 1, lambda: asked_for({"pp_size": 2})),
    "pipeline x replicas": (4, 2, lambda: asked_for({"pp_size": 2, "dp_replicate_size": 2})),
    "pipeline x fsdp": (4, 2, lambda: asked_for({"pp_size": 2, "dp_shard_size": 2})),
    "pipeline x tensor": (4, 1, lambda: asked_for({"pp_size": 2, "tp_size": 2})),
}


def make() -> list[tuple[Any, Any]]:
    torch.manual_seed(3)
    models = [Deep(), Deep()]
    return [(model, torch.optim.SGD(model.parameters(), lr=RATE)) for model in models]


def train(strategy: str, precision: str, window: int) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=window,
        kwargs_handlers=[GradScalerKwargs(**SCALE)],
        **STRATEGIES[strategy][2](),
    )
    (one, first), (other, second) = make()
    loader: Any = DataLoader(data(SAMPLES), batch_size=BATCH)
    one, loader, other, first, second = accelerator.prepare(one, loader, other, first, second)
    seen: dict[str, Any] = {"losses": [], "norms": [], "samples": []}
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(one, other):
                for model, wanted, optimizer in ((one, targets, first), (other, inputs, second)):
                    loss = accelerator.forward_backward(model, inputs, wanted, loss_of)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                        seen["norms"].append(float(norm))
                    optimizer.step()
                    optimizer.zero_grad()
                    seen["losses"].append(float(accelerator.reduce(loss, "mean")))
            seen["samples"] += accelerator.gather_for_metrics(inputs).tolist()
    return {**seen, "weights": [whole(accelerator, one), whole(accelerator, other)]}


def whole(accelerator: Accelerator, model: Any) -> dict[str, Any]:
    return {key: value.tolist() for key, value in accelerator.get_state_dict(model).items()}


@cache
def twin(shares: int, precision: str, window: int) -> dict[str, Any]:
    context = (
        torch.autocast("cpu", dtype=DTYPES[precision]) if precision in DTYPES else nullcontext()
    )
    pairs = make()
    scalers = [torch.amp.GradScaler("cpu", enabled=precision == "fp16", **SCALE) for _ in pairs]
    inputs, targets = data(SAMPLES).tensors
    size = BATCH * shares
    end = SAMPLES if shares == 1 else -(-SAMPLES // size) * size  # filled up
    batches = torch.tensor([index % SAMPLES for index in range(end)]).split(size)
    seen: dict[str, Any] = {"losses": [], "norms": [], "steps": 0}
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches, start=1):
            for (model, optimizer), scaler, wanted in zip(
                pairs, scalers, (targets, inputs), strict=True
            ):
                with context:
                    outputs = model(inputs[batch])
                loss = loss_of(outputs.float(), wanted[batch])
                scaler.scale(loss / window).backward()
                seen["losses"].append(float(loss.detach()))
                if number % window and number < len(batches):
                    continue
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                seen["norms"].append(float(norm))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                seen["steps"] += 1
    states = [model.state_dict() for model, _ in pairs]
    return {**seen, "weights": [{k: v.tolist() for k, v in state.items()} for state in states]}


def train_all(strategy: str) -> list[dict[str, Any]]:
    return [train(strategy, *case) for case in CASES]


# On a busy machine four ranks share less than one core: the deadline is that of ``run_ranks``.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_equals_one_process(strategy: str) -> None:
    ranks, shares, _ = STRATEGIES[strategy]
    results = run_ranks(train_all, ranks, strategy, timeout=180)
    for number, (precision, window) in enumerate(CASES):
        expected, rounding = twin(shares, precision, window), ROUNDING[precision]
        steps = expected["steps"]
        exact = twin(shares, "no", window)["losses"]
        samples = sorted(EPOCHS * data(SAMPLES).tensors[0].tolist())
        for result in results:
            ours, what = result[number], (precision, window)
            near = FLOAT_ERROR * steps + 8 * rounding
            assert ours["losses"] == pytest.approx(expected["losses"], abs=near), what
            assert precision == "no" or ours["losses"] != pytest.approx(exact, abs=1e-5), what
            assert ours["norms"] == pytest.approx(expected["norms"], rel=1e-5 + 16 * rounding), what
            assert sorted(ours["samples"]) == samples
            moved = FLOAT_ERROR * steps + rounding * RATE * steps
            for mine, theirs in zip(ours["weights"], expected["weights"], strict=True):
                assert mine.keys() == theirs.keys()
                assert mine["head.weight"] == mine["embed.weight"]
                for key, value in theirs.items():
                    torch.testing.assert_close(mine[key], value, atol=moved, rtol=0, msg=str(what))
