"""Fill in the "auto" entries of a DeepSpeed configuration from the prepared objects."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from notebook_accel.training.models.placeholders import DummyOptim, DummyScheduler
from notebook_accel.training.processes.devices import is_host
from notebook_accel.training.settings.deepspeed_plugin import AUTO, is_open

if TYPE_CHECKING:
    from torch.nn import Module

    from notebook_accel.training.processes.topology import Topology
    from notebook_accel.training.settings.deepspeed_plugin import DeepSpeedPlugin
    from notebook_accel.training.strategies.request import PrepareCall

__all__ = ["complete"]

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
    """Return the configuration for DeepSpeed; the plugin's own is completed in place.

    Args:
        plugin: what the user asked for.
        model: the model that is prepared.
        call: what is prepared with it.
        topology: number of ranks, and where this one computes.
        num_steps: batches a step of the optimizer.
        precision: "no", "bf16" or "fp16".
    """
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
    if is_host(topology.device) and "params" in made.get("optimizer", {}):
        # DeepSpeed's own Adam is compiled at its first use, which takes minutes and a compiler.
        made["optimizer"]["params"].setdefault("torch_adam", True)
    return made


def _buckets(model: Module) -> dict[str, Any]:
    """Return bucket sizes for the width of a Transformers model; nothing for other models."""
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
    """Arguments for DeepSpeed's learning-rate schedule. Step counts are divided by
    ``schedule_steps``, since it moves once for each step of the optimizer."""
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
