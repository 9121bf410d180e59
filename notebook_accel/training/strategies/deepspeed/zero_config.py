"""Fill in the "auto" entries of a DeepSpeed configuration from the prepared objects.

If the configuration describes an optimizer or a scheduler, a training script makes a placeholder
where it would make one of torch, and passes it to ``prepare``, which returns the one that DeepSpeed
made from its configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from notebook_accel.errors import ConfigError
from notebook_accel.training.strategies.deepspeed.deepspeed_plugin import (
    AUTO,
    DeepSpeedPlugin,
    is_open,
)
from notebook_accel.training.strategies.strategy_request import PrepareCall, Request

_ZERO = "zero_optimization."


class DummyOptim(torch.optim.Optimizer):
    """Placeholder for the optimizer in the section "optimizer" of a DeepSpeed configuration.

    ``prepare`` returns DeepSpeed's optimizer in its place.

    Attributes:
        params: the parameters or groups, as given.
        lr, weight_decay, kwargs: values for entries of that section that are "auto".
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        weight_decay: float = 0,
        **kwargs: Any,
    ) -> None:
        """Store the parameters, and the values for "auto" entries of the configuration.

        Args:
            params: parameters, or dictionaries of parameter groups.
            lr: learning rate, used if the configuration says "auto".
            weight_decay: weight decay, used if the configuration says "auto".
            **kwargs: values for further "auto" entries, such as ``betas`` and ``eps``.
        """
        given = list(params)
        # The base class completes the groups in place; DeepSpeed gets them as they were.
        self.params = [dict(one) if isinstance(one, dict) else one for one in given]
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        super().__init__(given, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> NoReturn:
        """Raise: the placeholder was not replaced by DeepSpeed's optimizer in ``prepare``.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(_alone("DummyOptim", "optimizer"))


class DummyScheduler(LRScheduler):
    """Placeholder for the scheduler in the section "scheduler" of a DeepSpeed configuration.

    ``prepare`` returns DeepSpeed's scheduler in its place.

    Attributes:
        optimizer, total_num_steps, warmup_num_steps, lr_scheduler_callable, kwargs: the arguments
            of the constructor, unchanged.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Store the values for "auto" entries of the configuration.

        Args:
            optimizer: the optimizer whose learning rates the scheduler sets.
            total_num_steps: length of the schedule. As for every prepared scheduler, it counts
                batches of the loader before ``prepare``: ``num_epochs * len(loader)``. None leaves
                it to the configuration.
            warmup_num_steps: steps until the full learning rate, counted in the same way.
            lr_scheduler_callable: called with the optimizer; returns a scheduler to use instead of
                the one in the configuration.
            **kwargs: values for further "auto" entries.
        """
        # Not the base class's, which would begin a schedule.
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self, epoch: int | None = None) -> NoReturn:
        """Raise: the placeholder was not replaced by DeepSpeed's scheduler in ``prepare``.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(_alone("DummyScheduler", "scheduler"))


def _alone(name: str, what: str) -> str:
    return (
        f"{name}.step() was called: it stands for the {what} of a DeepSpeed configuration, and "
        "none was put in its place. Make the Accelerator with a DeepSpeedPlugin and pass the "
        f"{name} to prepare() beside the model, or use a {what} of torch"
    )


def complete(
    plugin: DeepSpeedPlugin, model: Module, call: PrepareCall, request: Request
) -> dict[str, Any]:
    """Complete the plugin's configuration in place, and return it without "auto" entries."""
    topology, num_steps = request.topology, request.accumulation.num_steps
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
        "fp16.enabled": request.precision.name == "fp16",
        "bf16.enabled": request.precision.name == "bf16",
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
