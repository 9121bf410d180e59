"""Data parallelism: each rank has the whole model, and gradients are averaged at backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from notebook_accel.training import devices
from notebook_accel.training.renewal import note_wrapped
from notebook_accel.training.settings import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    pick_handler,
)
from notebook_accel.training.strategies.given import TakesSpreadModels, has_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

    from notebook_accel.training.strategies.request import ModelToPrepare

__all__ = ["DataParallel"]

_HOOKS: dict[DDPCommunicationHookType, Callable[..., Any]] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
    DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
    DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
    DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
}
_WRAPPERS: dict[DDPCommunicationHookType, Callable[..., Any]] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
    DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
}
_WITH_STATE = {DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD}


class DataParallel(TakesSpreadModels):
    """Torch's ``DistributedDataParallel``."""

    def prepare_model(self, given: ModelToPrepare) -> Module:
        model = super().prepare_model(given)
        # Torch refuses to wrap a model that has nothing to exchange.
        trains = given.training and any(weight.requires_grad for weight in model.parameters())
        if not trains or has_parts(model.parameters()):
            return model
        options = pick_handler(self.handlers, DistributedDataParallelKwargs)
        device_ids = None if given.device is None else devices.wrapper_device_ids(given.device)
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **options.wrapper_kwargs())
        _register_hook(wrapped, options)

        def wrap_again(wrapped: Any) -> None:
            # In place: the user's names, and the Accelerator, refer to this very object.
            inner, training = wrapped.module, wrapped.training
            wrapped.__init__(inner, device_ids=device_ids, **options.wrapper_kwargs())
            wrapped.training = training
            _register_hook(wrapped, options)

        note_wrapped(wrapped, wrap_again)
        return wrapped


def _register_hook(model: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    if options.comm_hook not in _HOOKS:
        return
    hook = _HOOKS[options.comm_hook]
    if options.comm_wrapper in _WRAPPERS:
        hook = _WRAPPERS[options.comm_wrapper](hook)
    state = None
    if options.comm_hook in _WITH_STATE:
        state = powerSGD_hook.PowerSGDState(process_group=None, **options.comm_state_option)
    model.register_comm_hook(state, hook)
