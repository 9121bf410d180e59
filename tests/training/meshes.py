"""A small transformer-like model, meshes to train it on, and the single process that it must equal.

The twin is plain torch: one process, no wrapper, batches of all shares together, from the same
weights and the same samples.

Tolerances. In float32, sharded, divided and whole training add up the same products in another
order: each sum of n terms may differ by about n * 2**-24 of its size. Sums here have at most a few
hundred terms of order 1, so losses and weights may part by some 1e-6 a step; a step that used a
wrong gradient (a share missing, one counted twice) is off by 1e-3 and more.

In bf16 and fp16 each product is rounded, relatively by 2**-8 or 2**-11, and in other places than
the twin's: ranks round the gradients of their own shares, stages those of their micro-batches,
``fully_shard`` the weights themselves. So a loss of order 1 may move by a few roundings, and a
weight by as much of the path that it went. AdamW divides by the root of a mean square, which would
make a step of a rounding error where a gradient is next to nothing: there its ``eps`` is large.
"""

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
)

FLOAT_ERROR = 1e-6
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"no": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
# Of fp16: nothing overflows. Steps that are skipped have tests of their own.
SCALE = 2.0**10
WORDS, WIDTH, LENGTH = 12, 8, 4
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Tiny(nn.Module):
    """Embedding and head are one weight."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.scale


class Deep(Tiny):
    """Enough blocks for two stages a rank; embedding and head, outside of them, are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block(), Block()])


def plugin(**fields: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, **fields)


blocks = functools.partial(
    plugin, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
)


def is_block(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """A policy as torch calls it: whether to look into a module, or to choose it."""
    return recurse or isinstance(module, Block)


def sharded(make: Any = plugin, **fields: Any) -> dict[str, Any]:
    return {"fsdp_plugin": make(**fields)}


def divided(**sizes: Any) -> dict[str, Any]:
    return {"parallelism_config": ParallelismConfig(**{"tp_plan": PLAN, **sizes})}


BY_SIZE = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100}
ON_THE_HOST = {"reshard_after_forward": False, "cpu_offload": True}
OF_ITS_OWN = {
    "auto_wrap_policy": is_block,
    "ignored_modules": r"blocks\.1\.down",
    "activation_checkpointing": True,
    "activation_checkpointing_offload": True,
}
# name: ranks, shares of the data, what the user asks for (made on the rank)
MESHES = {
    "fsdp": (2, 2, sharded),
    "fsdp, blocks": (2, 2, lambda: sharded(blocks)),
    "fsdp, blocks by size": (2, 2, lambda: sharded(**BY_SIZE)),
    "fsdp, kept whole, on the host": (2, 2, lambda: sharded(blocks, **ON_THE_HOST)),
    "fsdp, forward twice": (2, 2, lambda: sharded(blocks, activation_checkpointing=True)),
    "fsdp, a function chooses, a part is ignored": (2, 2, lambda: sharded(**OF_ITS_OWN)),
    "fsdp, nothing in parts": (2, 2, lambda: sharded(sharding_strategy="NO_SHARD")),
    "tensor": (2, 1, lambda: divided(tp_size=2)),
    "fsdp x tensor": (4, 2, lambda: {**sharded(blocks), **divided(dp_shard_size=2, tp_size=2)}),
    "replicas x tensor": (4, 2, lambda: divided(dp_replicate_size=2, tp_size=2)),
    "replicas x fsdp": (
        4,
        4,
        lambda: {**sharded(blocks), **divided(dp_replicate_size=2, dp_shard_size=2, tp_plan=None)},
    ),
}


BY_RANK = "1F1B, shards, files by rank"
THREE = "1F1B, three micro-batches"
INTERLEAVED = "Interleaved1F1B"
IN_STAGES = {"*.up": "colwise", "*.down": "rowwise"}
PIPELINES = {
    "1F1B": (2, 1, lambda: divided(pp_size=2, num_microbatches=2)),
    THREE: (2, 1, lambda: staged(num_microbatches=3)),
    "GPipe": (2, 1, lambda: staged(pp_schedule="GPipe")),
    "Interleaved1F1B": (2, 1, lambda: staged(pp_schedule=INTERLEAVED)),
    "1F1B, replicas": (4, 2, lambda: staged(dp_replicate_size=2)),
    "1F1B, shards": (4, 2, lambda: staged(dp_shard_size=2)),
    "Interleaved1F1B, shards": (4, 2, lambda: staged(dp_shard_size=2, pp_schedule=INTERLEAVED)),
    BY_RANK: (4, 2, lambda: {**staged(dp_shard_size=2), **sharded()}),
    "1F1B, tensor": (4, 1, lambda: staged(tp_size=2, tp_plan=IN_STAGES)),
}


def staged(**asked: Any) -> dict[str, Any]:
    return divided(pp_size=2, **{"tp_plan": None, **asked})


# A loop that calls ``forward_backward`` is the same for all.
LAYOUTS = {None: (2, 2, dict), "single": (1, 1, dict), **MESHES, **PIPELINES}
# Of models whose sequences are divided.
CONTEXTS: dict[str, tuple[int, int, Any]] = {
    "context": (2, 1, lambda: divided(cp_size=2)),
    "shards x context": (4, 2, lambda: divided(dp_shard_size=2, cp_size=2)),
    "replicas x context": (4, 2, lambda: divided(dp_replicate_size=2, cp_size=2)),
    "context x tensor": (4, 1, lambda: divided(cp_size=2, tp_size=2)),
    # By ``make test-eight``.
    "shards x context x tensor": (8, 2, lambda: divided(dp_shard_size=2, cp_size=2, tp_size=2)),
}
OWN_POLICY = "fsdp, gathered in bf16"
IN_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
# Of these, how they train is compared, and no more.
MORE: dict[str, tuple[int, int, Any]] = {
    OWN_POLICY: (2, 2, lambda: sharded(blocks, mixed_precision_policy=IN_BF16)),
    "fsdp, parts of unequal size": (3, 3, lambda: sharded(blocks)),
    # By ``make test-eight``.
    "1F1B, shards, tensor": (8, 2, lambda: staged(dp_shard_size=2, tp_size=2, tp_plan=IN_STAGES)),
    "1F1B, replicas, shards": (8, 4, lambda: staged(dp_replicate_size=2, dp_shard_size=2)),
    "replicas x fsdp x tensor": (
        8,
        4,
        lambda: {**sharded(), **divided(dp_replicate_size=2, dp_shard_size=2, tp_size=2)},
    ),
}


def accelerator_for(layout: str | None, **settings: Any) -> Accelerator:
    _, _, asked = {**CONTEXTS, **MORE, **LAYOUTS}[layout]
    return Accelerator(**{"cpu": True, **asked(), **settings})


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(WORDS, (samples, LENGTH + 1), generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def make(case: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(3)
    if "make" in case:
        return case["make"]()
    model = Tiny()
    if case.get("optimizer") == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # In 16 bits, a gradient next to nothing is a rounding error, of which AdamW would make a step.
    eps = case.get("eps", 1e-8)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def train(layout: str | None, case: dict[str, Any]) -> dict[str, Any]:
    """The loop as a user writes it; the optimizer is made before ``prepare``."""
    window = {"gradient_accumulation_steps": case.get("accumulate", 1)}
    if case.get("each"):
        each = GradientAccumulationPlugin(num_steps=case["accumulate"], sync_each_batch=True)
        window = {"gradient_accumulation_plugin": each}
    settings = {"mixed_precision": case.get("precision"), **window, **case.get("settings", {})}
    accelerator = accelerator_for(layout, **settings)
    # DDP takes whole models alone.
    is_empty = case.get("read_by_rank_0") and layout and not accelerator.is_main_process
    with torch.device("meta" if is_empty else "cpu"):
        model, optimizer = make(case)
    if "divide" in case:
        model, optimizer = case["divide"](accelerator, model)
    loader = DataLoader(data(case.get("samples", 16)), batch_size=case.get("batch", 2))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = {"losses": [], "norms": [], "samples": []}
    for epoch in range(2):
        if "windows" in case:
            accelerator.gradient_accumulation_steps = case["windows"][epoch]
        for number, (inputs, targets) in enumerate(loader, start=1):
            seen["samples"] += accelerator.gather_for_metrics(inputs).tolist()
            around = case.get("around", lambda *_: nullcontext())(accelerator, inputs, targets)
            with accelerator.accumulate(model), around:
                if (epoch, number) == case.get("drops"):
                    model(inputs)  # gives a loss that is not finite, say
                    optimizer.zero_grad()
                    continue
                if case.get("whole"):
                    loss = accelerator.forward_backward(model, inputs, targets, loss_of)
                else:
                    loss = loss_of(model(inputs), targets)
                    accelerator.backward(loss)
                if accelerator.sync_gradients and "clip" in case:
                    norm = accelerator.clip_grad_norm_(
                        model.parameters(), case["clip"], norm_type=case.get("norm", 2.0)
                    )
                    seen["norms"].append(float(norm))
                if accelerator.sync_gradients and "clip_value" in case:
                    accelerator.clip_grad_value_(model.parameters(), case["clip_value"])
                optimizer.step()
                optimizer.zero_grad()
            loss = case.get("joins", lambda _, loss: loss)(accelerator, loss.detach())
            seen["losses"].append(float(accelerator.reduce(loss, "mean")))
    return {
        **seen,
        "weights": weights_of(accelerator, model),
        **case.get("look", lambda _: {})(model),
    }


def weights_of(accelerator: Accelerator, model: Any) -> dict[str, Any]:
    state = accelerator.get_state_dict(model)
    return {name: value.tolist() for name, value in state.items()}


def twin(shares: int, case: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = make(case)
    dtype = DTYPES.get(case.get("precision", "no"))
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=SCALE)
    inputs, targets = data(case.get("samples", 16)).tensors
    size = case.get("batch", 2) * shares
    end = len(inputs) if shares == 1 else -(-len(inputs) // size) * size  # filled up
    filled = [index % len(inputs) for index in range(end)]
    batches = torch.tensor(filled).split(size)
    seen = {"losses": [], "norms": []}
    for epoch, window in enumerate(case.get("windows", [case.get("accumulate", 1)] * 2)):
        for number, batch in enumerate(batches, start=1):
            if (epoch, number) == case.get("drops"):
                optimizer.zero_grad()
                continue
            with torch.autocast("cpu", dtype) if dtype else nullcontext():
                outputs = model(inputs[batch])
            loss = loss_of(outputs.float(), targets[batch])
            scaler.scale(loss / window).backward()
            seen["losses"].append(float(loss.detach()))
            if number % window and number < len(batches):
                continue
            scaler.unscale_(optimizer)
            if "clip" in case:
                norm = nn.utils.clip_grad_norm_(
                    model.parameters(), case["clip"], norm_type=case.get("norm", 2.0)
                )
                seen["norms"].append(float(norm))
            if "clip_value" in case:
                nn.utils.clip_grad_value_(model.parameters(), case["clip_value"])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    return {**seen, "weights": weights, **case.get("look", lambda _: {})(model)}


def check_run(
    ours: dict[str, Any],
    expected: dict[str, Any],
    case: dict[str, Any],
    float_error: float = FLOAT_ERROR,
) -> None:
    """Compare what one rank saw of a case with its twin; each sample counts once an epoch.

    Args:
        float_error: how far float32 may be off after a step.
    """
    rounding = ROUNDING[case.get("precision") or "no"]
    error = 2 * float_error * len(expected["losses"]) + 8 * rounding
    assert ours["losses"] == pytest.approx(expected["losses"], abs=error)
    of_norms = 10 * float_error + 16 * rounding
    assert ours["norms"] == pytest.approx(expected["norms"], rel=of_norms)
    # In 16 bits, as much of the path that a weight goes: an error of a gradient moves it by no
    # more than twice lr / eps of AdamW, which is 0.2 in these cases.
    moved = (2 * float_error + 0.2 * rounding) * len(expected["losses"])
    check_weights(ours["weights"], expected["weights"], min(error, moved))
    samples = data(case.get("samples", 16)).tensors[0].tolist()
    assert sorted(ours["samples"]) == sorted(2 * samples)


def check_weights(mine: dict[str, Any], theirs: dict[str, Any], error: float) -> None:
    """Compare weights that were sent as lists; torch would take those apart number by number."""
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            torch.tensor(mine[name]), torch.tensor(value), atol=error, rtol=0
        )
