"""What a pickled ``Accelerator`` keeps, and how one is made of it again.

Process group, device, open trackers and the hooks of checkpoints are the process's. So a pickle
holds the arguments of the ``Accelerator``, what it had prepared and where its window stood; the
process that unpickles it calls the class with those arguments, which finds or makes the rest::

    Accelerator --dumps--> Pickled(arguments, prepared, window) --loads--> Accelerator(*arguments)
                                                                             prepared objects in
                                                                             its windows and scale

Where the arguments make new process groups (a mesh), all ranks have to unpickle it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accel.training import devices
from notebook_accel.training.data import PreparedLoader

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from notebook_accel.training.accelerator import Accelerator
    from notebook_accel.training.optimizer import AcceleratedOptimizer
    from notebook_accel.training.prepare import PreparedModel
    from notebook_accel.training.scheduler import AcceleratedScheduler

__all__ = ["Pickled"]

# Arguments that are fields of the configuration of loaders, too.
_FIELDS_OF_LOADERS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")


@dataclass(frozen=True, kw_only=True)
class Pickled:
    """An ``Accelerator`` without what is its process's."""

    kind: type[Accelerator]
    arguments: dict[str, Any]
    """Those of ``Accelerator.__init__``."""
    extras: dict[str, Any]
    """Attributes that a subclass or the user's code added."""

    models: list[PreparedModel]
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[AcceleratedScheduler]
    loaders: list[DataLoader[Any]]
    custom: list[Any]
    """What ``register_for_checkpointing`` was given."""

    num_steps: int
    step: int
    sync_gradients: bool
    native_amp: bool
    loss_scale: dict[str, Any]
    """State of the loss scaler; empty where there is none."""
    iteration: int
    """Number of the next numbered checkpoint."""

    @classmethod
    def of(cls, accelerator: Accelerator) -> Pickled:
        """What to pickle in place of an ``Accelerator``."""
        prepared, plan = accelerator._prepared, accelerator._plan
        own = {*accelerator._made_here, "_made_here"}
        return cls(
            kind=type(accelerator),
            arguments={
                **{
                    name: value
                    for name, value in accelerator._asked.items()
                    if name not in ("self", "others", "__class__")
                },
                # As they are now: the user may have set them.
                "dataloader_config": plan.loaders,
                **dict.fromkeys(_FIELDS_OF_LOADERS),
                "device_placement": plan.device_placement,
                "kwargs_handlers": plan.handlers,
                "rng_types": plan.rng_types,
                "step_scheduler_with_optimizer": plan.step_scheduler_with_optimizer,
            },
            extras={name: value for name, value in vars(accelerator).items() if name not in own},
            models=prepared.models,
            optimizers=prepared.optimizers,
            schedulers=prepared.schedulers,
            loaders=prepared.loaders,
            custom=accelerator._checkpoints.custom,
            num_steps=accelerator.gradient_accumulation_steps,
            step=accelerator.step,
            sync_gradients=accelerator.sync_gradients,
            native_amp=plan.precision.is_on,
            loss_scale={} if accelerator.scaler is None else accelerator.scaler.state_dict(),
            iteration=accelerator.save_iteration,
        )

    def make_again(self, base: type[Accelerator]) -> Accelerator:
        """An ``Accelerator`` of the same arguments, which has prepared the same objects.

        Args:
            base: ``Accelerator`` itself, whose arguments these are. What the ``__init__`` of a
                subclass takes is not known; what it added is kept.
        """
        made = self.kind.__new__(self.kind)
        base.__init__(made, **self.arguments)
        vars(made).update(self.extras)
        made.gradient_accumulation_steps = self.num_steps
        made.step, made.sync_gradients = self.step, self.sync_gradients
        made._plan.precision.is_on = self.native_amp
        if not self.loss_scale:
            made.scaler = None
        else:
            if made.scaler is None:
                made.scaler = made._plan.strategy.kind_of_scaling.kind_of_scaler(made.device.type)
            made.scaler.load_state_dict(self.loss_scale)
        made.project_configuration.iteration = self.iteration
        made._checkpoints.register(self.custom)
        prepared, plan = made._prepared, made._plan
        for model in self.models:
            plan.precision.wrap(model.inner)  # a pickled module has its plain forward
            prepared.models.append(model)
        for loader in self.loaders:
            if isinstance(loader, PreparedLoader):  # code may have added others to the list
                loader._join(plan.accumulation)
            prepared.loaders.append(loader)
        for optimizer in self.optimizers:
            optimizer.join(
                plan.accumulation,
                plan.strategy.scaling,
                devices.memory_reader(plan.topology.device),
                plan.strategy.drop_unreduced,
            )
            prepared.watch.knows(optimizer.optimizer)
            prepared.optimizers.append(optimizer)
        for scheduler in self.schedulers:
            scheduler.join(plan.accumulation)
            prepared.schedulers.append(scheduler)
        return made
