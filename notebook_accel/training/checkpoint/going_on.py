"""A training that goes on with other arguments: shapes are compared, settings given anew win."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim.lr_scheduler import LRScheduler

from notebook_accel.training.checkpoint.folders import format_in
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer, inner_optimizer
from notebook_accel.training.stepping.scheduler import AcceleratedScheduler

_MAX_NAMED = 3


def check_shapes(models: Sequence[Module], folder: Path) -> None:
    """Raise RuntimeError if a weight has another shape in a checkpoint; only headers are read."""
    wrong, kind = [], format_in(folder)()
    for index, model in enumerate(models):
        saved = kind.shapes(folder, index)
        for name, value in model.state_dict(keep_vars=True).items():
            # One that is made by the first forward has no shape yet, and ZeRO's have none here.
            if not torch.is_tensor(value) or torch.nn.parameter.is_lazy(value) or not value.dim():
                continue
            shape = tuple(value.shape)
            if value.numel() and saved.get(name, shape) != shape:
                wrong.append(f"size mismatch for {name}: {saved[name]} there, {shape} in the model")
    if wrong:
        more = f"; and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise RuntimeError(
            f"{folder} does not fit the model, and nothing was loaded. "
            f"{'; '.join(wrong[:_MAX_NAMED])}{more}"
        )


def _schedulers_within(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield a scheduler, and those that it runs in turns or together."""
    yield scheduler
    for held in vars(scheduler).values():
        for inner in held if isinstance(held, (list, tuple)) else ():
            if isinstance(inner, LRScheduler):
                yield from _schedulers_within(inner)


def give_new_settings(
    optimizers: Sequence[AcceleratedOptimizer],
    schedulers: Sequence[AcceleratedScheduler],
    made: Sequence[list[dict[str, Any]]],
    before: Sequence[list[dict[str, Any]]],
) -> None:
    """Give loaded optimizers the settings that the function now makes otherwise than before.

    A rate is scaled by new over old, and so are those of its schedules, which keep their place.

    Args:
        made, before: ``settings_of`` each optimizer as it is made now, and as it was made.
    """
    for known, now, old in zip(optimizers, made, before, strict=False):
        own = [
            one
            for each in schedulers
            for one in _schedulers_within(each.scheduler)
            if inner_optimizer(one.optimizer) is known.optimizer
        ]
        for index, (group, new, was) in enumerate(zip(known.param_groups, now, old, strict=False)):
            changed = {k: v for k, v in new.items() if k in was and v != was[k]}
            rate = changed.pop("lr", None)
            group.update(changed)
            if rate is None:
                continue
            factor = rate / was["lr"] if was["lr"] else 1.0
            group["lr"] = rate if group["lr"] == was["lr"] else group["lr"] * factor
            if "initial_lr" in group:
                group["initial_lr"] = rate
            for scheduler in own:
                if index < len(getattr(scheduler, "base_lrs", ())):
                    scheduler.base_lrs[index] = rate
