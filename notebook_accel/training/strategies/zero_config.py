"""A DeepSpeed configuration completed from what is prepared: what its "auto" entries come to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError
from notebook_accel.training.processes.devices import is_host
from notebook_accel.training.settings.deepspeed_plugin import AUTO, is_open

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.nn import Module

    from notebook_accel.training.models.placeholders import DummyOptim, DummyScheduler
    from notebook_accel.training.settings.deepspeed_plugin import DeepSpeedPlugin

__all__ = ["Facts", "complete"]

_ZERO = "zero_optimization."


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known as a model is prepared."""

    model: Module
    device: torch.device
    num_ranks: int
    num_steps: int
    """Batches a step of the optimizer."""
    precision: str
    """ "no", "bf16" or "fp16"."""
    optimizer: DummyOptim | None = None
    """What stands for the configuration's optimizer."""
    scheduler: DummyScheduler | None = None
    """What stands for the configuration's scheduler."""
    schedule_steps: int = 1
    """By how much a schedule moves with a step of the optimizer."""
    batch_sizes: Sequence[int] = field(default_factory=tuple)
    """Samples of a rank's batch, for each loader that knows its batch size."""


def complete(plugin: DeepSpeedPlugin, facts: Facts) -> dict[str, Any]:
    """The configuration for DeepSpeed; the plugin's own is completed in place.

    Raises:
        ConfigError: an entry says something else than what is prepared.
    """
    config = plugin.hf_ds_config
    config.reopen()
    for name in ("fp16", "bf16"):
        if is_open(plugin.get_value(f"{name}.enabled")):
            config.set_value(f"{name}.enabled", AUTO)
    made: dict[str, Any] = config.fill(
        {
            **_batches(plugin, facts),
            **_buckets(facts.model),
            **_optimizer(facts.optimizer),
            **_schedule(facts),
            "fp16.enabled": facts.precision == "fp16",
            "bf16.enabled": facts.precision == "bf16",
            "gradient_clipping": 0.0,
            _ZERO + "stage3_gather_16bit_weights_on_model_save": False,
        }
    )
    # DeepSpeed's default clips every training at 1.
    made.setdefault("gradient_clipping", 0.0)
    # As it is now: code may have set it at the Accelerator since.
    made["gradient_accumulation_steps"] = facts.num_steps
    made.setdefault("train_micro_batch_size_per_gpu", _micro_batch(plugin, facts))
    # Which optimizers DeepSpeed tried is no reason to refuse the user's own, nor to change it for
    # another on the host.
    made.setdefault("zero_allow_untested_optimizer", True)
    made.setdefault("zero_force_ds_cpu_optimizer", False)
    if is_host(facts.device) and "params" in made.get("optimizer", {}):
        # DeepSpeed's own Adam is compiled at its first use, which takes minutes and a compiler.
        made["optimizer"]["params"].setdefault("torch_adam", True)
    return made


def _micro_batch(plugin: DeepSpeedPlugin, facts: Facts) -> int:
    """Samples of a rank's batch: DeepSpeed only counts samples by it."""
    asked = plugin.get_value("train_micro_batch_size_per_gpu")
    if not is_open(asked):
        return int(asked)
    if facts.batch_sizes:
        if len(set(facts.batch_sizes)) == 1:
            return facts.batch_sizes[0]
        return (min if plugin.is_train_batch_min else max)(facts.batch_sizes)
    total = plugin.get_value("train_batch_size")
    return 1 if is_open(total) else max(1, int(total) // (facts.num_ranks * facts.num_steps))


def _batches(plugin: DeepSpeedPlugin, facts: Facts) -> dict[str, Any]:
    micro = _micro_batch(plugin, facts)
    if facts.batch_sizes and micro not in facts.batch_sizes:
        sizes = ", ".join(map(str, facts.batch_sizes))
        raise ConfigError(
            f"the DeepSpeed configuration has train_micro_batch_size_per_gpu: {micro}, and the "
            f'prepared loaders give {sizes} samples a rank at once. Set it to "auto"'
        )
    total = micro * facts.num_steps * facts.num_ranks
    asked = plugin.get_value("train_batch_size")
    if not is_open(asked) and asked != total:
        raise ConfigError(
            f"the DeepSpeed configuration has train_batch_size: {asked}, and {micro} samples a "
            f"batch x {facts.num_steps} batches a step x {facts.num_ranks} ranks are {total}. "
            'Set it to "auto"'
        )
    return {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": facts.num_steps,
    }


def _buckets(model: Module) -> dict[str, Any]:
    """Sizes that follow from the width of a Transformers model; of others DeepSpeed's defaults."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    widths = getattr(config, "hidden_sizes", None) or [getattr(config, "hidden_size", None) or 0]
    width = max(widths)
    if not isinstance(width, int) or not width:
        return {}
    return {
        _ZERO + "reduce_bucket_size": width * width,
        _ZERO + "stage3_prefetch_bucket_size": int(0.9 * width * width),
        _ZERO + "stage3_param_persistence_threshold": 10 * width,
    }


def _optimizer(placeholder: DummyOptim | None) -> dict[str, Any]:
    if placeholder is None:
        return {}
    settings = {"lr": placeholder.lr, "weight_decay": placeholder.weight_decay}
    return {f"optimizer.params.{k}": v for k, v in {**settings, **placeholder.kwargs}.items()}


def _schedule(facts: Facts) -> dict[str, Any]:
    placeholder = facts.scheduler
    if placeholder is None:
        return {}
    rate = max(group["lr"] for group in placeholder.optimizer.param_groups)
    values: dict[str, Any] = {
        "warmup_min_lr": 0,
        "warmup_max_lr": rate,
        # DeepSpeed refuses a warm-up of no step.
        "warmup_num_steps": max(1, _moves(placeholder.warmup_num_steps, facts)),
        **placeholder.kwargs,
    }
    if placeholder.total_num_steps is not None:
        values["total_num_steps"] = _moves(placeholder.total_num_steps, facts)
    return {f"scheduler.params.{name}": value for name, value in values.items()}


def _moves(steps: int, facts: Facts) -> int:
    """The length of a schedule as DeepSpeed counts it, whose schedules move once with a step of the
    optimizer; others move ``schedule_steps`` times."""
    return math.ceil(steps / facts.schedule_steps)
