"""Fill in the "auto" entries of a DeepSpeed configuration from the prepared objects."""

from __future__ import annotations

import math
from typing import Any

from torch.nn import Module

from notebook_accel.training.models.placeholders import DummyOptim, DummyScheduler
from notebook_accel.training.processes.topology import Topology
from notebook_accel.training.strategies.deepspeed.deepspeed_plugin import (
    AUTO,
    DeepSpeedPlugin,
    is_open,
)
from notebook_accel.training.strategies.strategy_request import PrepareCall

_ZERO = "zero_optimization."


def complete(
    plugin: DeepSpeedPlugin,
    model: Module,
    call: PrepareCall,
    *,
    topology: Topology,
    num_steps: int,
    precision: str,
) -> dict[str, Any]:
    """Complete the plugin's configuration in place, and return it without "auto" entries."""
    config = plugin.hf_ds_config
    config.reopen()
    for name in ("fp16", "bf16"):
        if is_open(plugin.get_value(f"{name}.enabled")):
            config.set_value(f"{name}.enabled", AUTO)
    num_batches = num_steps * topology.num_processes
    micro = plugin.get_value("train_micro_batch_size_per_gpu")
    if is_open(micro):
        micro = (min if plugin.is_train_batch_min else max)(call.batch_sizes, default=None)
    if micro is None:
        total = plugin.get_value("train_batch_size")
        micro = 1 if is_open(total) else max(1, total // num_batches)
    values = {
        "train_batch_size": micro * num_batches,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": num_steps,
        "gradient_clipping": 0.0,
        "fp16.enabled": precision == "fp16",
        "bf16.enabled": precision == "bf16",
        _ZERO + "stage3_gather_16bit_weights_on_model_save": False,
        **_buckets(model),
    }
    for optimizer in call.optimizers:
        if isinstance(optimizer, DummyOptim):
            settings = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
            settings |= optimizer.kwargs
            values |= {f"optimizer.params.{name}": value for name, value in settings.items()}
    for scheduler in call.schedulers:
        if isinstance(scheduler, DummyScheduler):
            settings = _schedule(scheduler, call.schedule_steps)
            values |= {f"scheduler.params.{name}": value for name, value in settings.items()}
    made: dict[str, Any] = config.fill(values)
    # DeepSpeed's default clips every training at 1.
    made.setdefault("gradient_clipping", 0.0)
    # As it is now: code may have set it at the Accelerator since.
    made["gradient_accumulation_steps"] = num_steps
    made.setdefault("train_micro_batch_size_per_gpu", micro)
    # Which optimizers DeepSpeed tried is no reason to refuse the user's own, nor to change it for
    # another on the host.
    made.setdefault("zero_allow_untested_optimizer", True)
    made.setdefault("zero_force_ds_cpu_optimizer", False)
    if topology.device.type == "cpu" and "params" in made.get("optimizer", {}):
        # DeepSpeed's own Adam is compiled at its first use, which takes minutes and a compiler.
        made["optimizer"]["params"].setdefault("torch_adam", True)
    return made


def _buckets(model: Module) -> dict[str, Any]:
    """Return ZeRO's bucket sizes by a Transformers model's hidden size; else nothing."""
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


def _schedule(placeholder: DummyScheduler, schedule_steps: int) -> dict[str, Any]:
    """Return arguments for DeepSpeed's learning-rate schedule, taken from a ``DummyScheduler``.

    DeepSpeed's schedule advances by 1 with each optimizer step, a prepared scheduler by
    ``schedule_steps``. So the step counts of the placeholder are divided by ``schedule_steps``.
    """
    steps = math.ceil(placeholder.warmup_num_steps / schedule_steps)
    values: dict[str, Any] = {
        "warmup_min_lr": 0,
        "warmup_max_lr": max(group["lr"] for group in placeholder.optimizer.param_groups),
        # DeepSpeed refuses a warm-up of no step.
        "warmup_num_steps": max(1, steps),
        **placeholder.kwargs,
    }
    if placeholder.total_num_steps is not None:
        values["total_num_steps"] = math.ceil(placeholder.total_num_steps / schedule_steps)
    return values
