"""Distributed training equals single-process training of the same global batches.

The twin is plain torch: one process, no wrapper, batches of all ranks together. Ranks and twin
start from the same weights and see the same samples, the repeated ones at an uneven end included.

Tolerances. In float32 both compute the same sums in another order: 1e-6 a step. In bf16 and fp16
each rank rounds the gradient of its own share, the twin that of the whole batch: relative to the
gradients, one rounding (2**-8, 2**-11) each, so the weights may part by two roundings of the path
that they went (learning rate times the largest gradient, summed over the steps). The same training
with one rank's shares computed one after the other rounds exactly like the ranks, and is held to
float32's tolerance in every precision.
"""

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, GradScalerKwargs
from tests.training.harness import run_ranks

EPOCHS = 2
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"no": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
FLOAT_ERROR = 1e-6
# Scales of fp16 at which gradients overflow for a few halvings, and never. In between it may
# depend on the share: that of one rank can overflow where the mean of all does not.
HUGE = {"init_scale": 2.0**19}
SMALL = {"init_scale": 2.0**10}


@dataclass(frozen=True)
class Case:
    """One way to train."""

    samples: int = 12
    batch: int = 3
    precision: str = "no"
    accumulate: int = 1
    zero_first: bool = False
    split: bool = False
    clip_norm: float | None = None
    clip_value: float | None = None
    schedule: str | None = None
    rate: float = 0.1
    optimizer: str = "sgd"
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "plain": Case(),
    "adamw": Case(optimizer="adamw", rate=1e-2),
    "uneven last batch": Case(samples=10),
    "accumulation, zero_grad last": Case(samples=18, accumulate=2),
    "accumulation, zero_grad first": Case(samples=18, accumulate=2, zero_first=True),
    "accumulation, uneven": Case(samples=23, accumulate=3, zero_first=True),
    "clipping by norm": Case(clip_norm=0.05),
    "clipping by value": Case(clip_value=0.01),
    "clipping a window": Case(samples=18, accumulate=2, clip_norm=0.05),
    "split batches": Case(samples=14, batch=6, split=True),
    "scheduler prepared": Case(schedule="prepared"),
    "scheduler prepared, accumulation": Case(samples=18, schedule="prepared", accumulate=2),
    "scheduler prepared, split": Case(batch=6, split=True, schedule="prepared"),
    "scheduler not prepared": Case(schedule="bare"),
    "bf16": Case(samples=18, precision="bf16"),
    "bf16, accumulation, clipping": Case(18, 3, "bf16", accumulate=2, clip_norm=0.05),
    "fp16": Case(samples=18, precision="fp16", settings=SMALL),
    "fp16, skipped steps": Case(24, 3, "fp16", settings=HUGE),
    "fp16, skipped steps, scheduler": Case(24, 3, "fp16", schedule="prepared", settings=HUGE),
    "fp16, accumulation, clipping": Case(
        18, 3, "fp16", accumulate=2, zero_first=True, clip_norm=0.05, settings=SMALL
    ),
}


def make(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    inputs = torch.randn(case.samples, 5, generator=generator)
    targets = torch.randn(case.samples, 3, generator=generator)
    optimizer = kinds[case.optimizer](model.parameters(), lr=case.rate)
    return model, optimizer, TensorDataset(inputs, targets)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def train_on_ranks(names: list[str]) -> dict[str, Any]:
    """What one rank does: all cases, one after the other."""
    return {name: train(CASES[name]) for name in names}


def train(case: Case) -> dict[str, Any]:
    """The loop as a user writes it."""
    handlers = [GradScalerKwargs(**case.settings)] if case.settings else []
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.accumulate,
        split_batches=case.split,
        kwargs_handlers=handlers,
    )
    model, optimizer, data = make(case)
    schedule = make_schedule(optimizer) if case.schedule == "prepared" else None
    loader = DataLoader(data, batch_size=case.batch)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if case.schedule == "bare":
        schedule = make_schedule(optimizer)
    seen: dict[str, Any] = {"rates": [], "skipped": [], "scales": [], "norms": []}
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                if case.zero_first:
                    optimizer.zero_grad()
                loss = ((model(inputs) - targets) ** 2).mean()
                accelerator.backward(loss)
                clip_ours(case, accelerator, model, seen)
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                if not case.zero_first:
                    optimizer.zero_grad()
            if accelerator.sync_gradients:
                note(seen, optimizer, accelerator.optimizer_step_was_skipped, accelerator.scaler)
    weights = accelerator.unwrap_model(model).state_dict()
    return {**seen, "weights": {name: value.tolist() for name, value in weights.items()}}


def clip_ours(case: Case, accelerator: Accelerator, model: Any, seen: dict[str, Any]) -> None:
    if case.clip_norm is not None:
        norm = accelerator.clip_grad_norm_(model.parameters(), case.clip_norm)
        if accelerator.sync_gradients:
            seen["norms"].append(norm.item())
    if case.clip_value is not None:
        accelerator.clip_grad_value_(model.parameters(), case.clip_value)


def note(seen: dict[str, Any], optimizer: Any, skipped: bool, scaler: Any) -> None:
    seen["rates"].append(optimizer.param_groups[0]["lr"])
    seen["skipped"].append(skipped)
    seen["scales"].append(1.0 if scaler is None else scaler.get_scale())


def global_batches(case: Case, ranks: int) -> list[list[int]]:
    """Samples of all ranks a step, those repeated at the end included."""
    size = case.batch if case.split else case.batch * ranks
    end = case.samples if ranks == 1 else math.ceil(case.samples / size) * size
    order = [index % case.samples for index in range(end)]
    return [order[start : start + size] for start in range(0, end, size)]


def twin(case: Case, ranks: int, *, shares: int) -> dict[str, Any]:
    """Plain torch on the global batches, computed in ``shares`` parts one after the other."""
    model, optimizer, data = make(case)
    dtype = DTYPES[case.precision]
    context = torch.autocast("cpu", dtype=dtype) if dtype else nullcontext()
    scaler = torch.amp.GradScaler("cpu", enabled=case.precision == "fp16", **case.settings)
    schedule = make_schedule(optimizer) if case.schedule else None
    moves = 1 if case.split or case.schedule == "bare" else ranks
    batches = global_batches(case, ranks)
    seen: dict[str, Any] = {"rates": [], "skipped": [], "scales": [], "norms": [], "path": 0.0}
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches, start=1):
            for share in torch.tensor(batch).chunk(shares):
                inputs, targets = data.tensors[0][share], data.tensors[1][share]
                with context:
                    outputs = model(inputs)
                loss = ((outputs.float() - targets) ** 2).mean() / case.accumulate
                scaler.scale(loss).backward()
            if number % case.accumulate and number < len(batches):
                continue
            for weight in model.parameters():
                weight.grad /= shares
            scaler.unscale_(optimizer)
            clip(case, model, seen)
            rate = optimizer.param_groups[0]["lr"]
            before = scaler.get_scale()
            largest = max(weight.grad.abs().max().item() for weight in model.parameters())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped = scaler.get_scale() < before
            seen["path"] += 0.0 if skipped else rate * largest
            if schedule is not None and (not skipped or case.schedule == "bare"):
                for _ in range(moves):
                    schedule.step()
            note(seen, optimizer, skipped, scaler)
    return {**seen, "weights": model.state_dict()}


def clip(case: Case, model: nn.Module, seen: dict[str, Any]) -> None:
    if case.clip_norm is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        seen["norms"].append(norm.item())
    if case.clip_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), case.clip_value)


@pytest.fixture(scope="module", params=[1, 2, 3])
def trained(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    """All cases, trained on one, two and three ranks."""
    return request.param, run_ranks(train_on_ranks, request.param, list(CASES))


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(name: str, trained: tuple[int, list[dict[str, Any]]]) -> None:
    ranks, results = trained
    case = CASES[name]
    whole, parts = twin(case, ranks, shares=1), twin(case, ranks, shares=ranks)
    steps = len(whole["rates"])
    for result in results:
        ours = result[name]
        assert ours["rates"] == pytest.approx(whole["rates"], rel=1e-12)
        assert ours["skipped"] == whole["skipped"]
        assert ours["scales"] == whole["scales"]
        rounding = ROUNDING[case.precision]
        assert ours["norms"] == pytest.approx(whole["norms"], rel=1e-5 + 4 * rounding)
        assert distance(ours, parts) <= FLOAT_ERROR * steps
        assert distance(ours, whole) <= FLOAT_ERROR * steps + 2 * rounding * whole["path"]
    assert distance(whole, {"weights": make(case)[0].state_dict()}) > 1e-3, "nothing was trained"


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(
        (torch.as_tensor(one["weights"][name]) - torch.as_tensor(value)).abs().max().item()
        for name, value in other["weights"].items()
    )


def test_the_cases_that_should_skip_steps_do() -> None:
    for name, case in CASES.items():
        skipped = twin(copy.deepcopy(case), 2, shares=1)["skipped"]
        assert any(skipped) == ("skipped" in name)
        assert not all(skipped)
