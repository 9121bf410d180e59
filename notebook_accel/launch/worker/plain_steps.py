"""Counts the steps of optimizers that no Accelerator of ours has prepared.

With them plain DDP, transformers' Trainer, Lightning and fastai come to points at which all ranks
stop, pause or take a knob's value (actions/scoreboard.py), and the panel shows that they train.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from notebook_accel.errors import RunStopped
from notebook_accel.private import of_torch
from notebook_accel.rank import this_rank
from notebook_accel.system.modules import change_module


def install() -> None:
    """Have the steps of all optimizers of torch and of fastai counted in this process."""
    change_module("torch.optim.optimizer", _follow_optimizers)
    change_module("fastai.learner", _follow_fastai)


def _begin(optimizer: Any, *_: Any) -> None:
    if not _is_compiling():
        context: Any = this_rank.current()
        context.begin_plain_step(optimizer, of_torch.num_collectives, _off_device)


def _end(optimizer: Any, *_: Any) -> None:
    if not _is_compiling():
        context: Any = this_rank.current()
        context.end_plain_step(optimizer, _memory)


def _is_compiling() -> bool:
    """Whether torch.compile traces a step: it would not trace what counts."""
    return bool(sys.modules["torch"].compiler.is_compiling())


def _follow_optimizers(module: Any) -> None:
    module.register_optimizer_step_pre_hook(_begin)
    module.register_optimizer_step_post_hook(_end)


def _follow_fastai(learner: Any) -> None:
    class LearnerSteps(learner.Callback):  # type: ignore[misc]
        def before_step(self) -> None:
            _begin(self.opt)

        def after_step(self) -> None:
            _end(self.opt)
            if this_rank.current().should_stop():
                # The search for a learning rate fails where it is cut short.
                is_search = hasattr(self.learn, "lr_finder")
                raise RunStopped("the run was stopped") if is_search else learner.CancelFitException

        def after_batch(self) -> None:
            if not self.training:  # a validation may take longer than a stop waits to be heard
                this_rank.current().should_stop()

        def __reduce__(self) -> tuple[Any, ...]:
            return learner.Callback, ()  # an exported learner needs nothing of ours

    learner.defaults.callbacks.append(LearnerSteps)


def _off_device(optimizers: list[Any]) -> AbstractContextManager[None]:
    memory = import_module("notebook_accel.training.processes.device_memory")
    device = max(map(_device, optimizers), key=lambda device: device.type != "cpu")
    moved: AbstractContextManager[None] = memory.off_device(device, (), optimizers)
    return moved


def _memory(optimizer: Any) -> this_rank.DeviceMemory | None:
    devices = import_module("notebook_accel.training.processes.devices")
    read = devices.memory_reader(_device(optimizer))
    return read() if read is not None else None


def _device(optimizer: Any) -> Any:
    return next(
        (one.device for group in optimizer.param_groups for one in group["params"]),
        sys.modules["torch"].device("cpu"),
    )
