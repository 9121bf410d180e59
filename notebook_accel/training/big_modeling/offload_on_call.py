"""Models of a pipeline, one on the device at a time: each brings itself in and sends one away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training import topology
from notebook_accel.training.big_modeling.hooks import (
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from notebook_accel.training.nested import send_to_device

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from notebook_accel.training.big_modeling.tensors import AnyDevice

__all__ = ["CpuOffload", "UserCpuOffloadHook", "cpu_offload_with_hook"]


class CpuOffload(ModelHook):
    """Keeps a model on the host until its forward runs; from then on it is on the device.

    Args:
        execution_device: where it computes; None takes this rank's device.
        prev_module_hook: of the model that is sent back to the host before this one comes in.
    """

    def __init__(
        self,
        execution_device: AnyDevice | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = (
            topology.topology().device if execution_device is None else execution_device
        )

    def init_hook(self, module: Module) -> Module:
        return module.to("cpu")

    def pre_forward(
        self, module: Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        return (
            send_to_device(args, self.execution_device),
            send_to_device(kwargs, self.execution_device),
        )


class UserCpuOffloadHook:
    """The handle by which a user sends a model back to the host, or stops all this."""

    def __init__(self, model: Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model back to the host now."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off the model, which stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[Module, UserCpuOffloadHook]:
    """Keep a model on the host until its forward runs, and then on the device until asked.

    ``cpu_offload`` fetches weights layer by layer and needs less memory; this moves whole models
    and is faster for one that runs many times in a row.

    Args:
        model: goes to the host now.
        execution_device: where it computes; None takes this rank's device.
        prev_module_hook: of the model before it in a pipeline, which is sent away then.

    Returns:
        the model, and the handle with ``offload()`` and ``remove()``.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
