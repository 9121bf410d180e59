"""Data parallelism: each rank has the whole model, and gradients are averaged at backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from notebook_accel.training import devices
from notebook_accel.training.renewal import note_wrapped
from notebook_accel.training.settings import DistributedDataParallelKwargs, pick_handler
from notebook_accel.training.strategies.given import TakesSpreadModels, has_parts

if TYPE_CHECKING:
    from torch.nn import Module

    from notebook_accel.training.strategies.request import ModelToPrepare, Request

__all__ = ["DataParallel"]


class DataParallel(TakesSpreadModels):
    """Torch's ``DistributedDataParallel``."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        asked = request.parallelism
        if asked is not None:
            # Not used here: scripts average a loss over the mesh's "dp_cp", whatever its size.
            self.mesh = asked.device_mesh = asked.build_device_mesh(self.topology.device.type)

    def prepare_model(self, given: ModelToPrepare) -> Module:
        model = super().prepare_model(given)
        # Torch refuses to wrap a model that has nothing to exchange.
        trains = given.training and any(weight.requires_grad for weight in model.parameters())
        if not trains or has_parts(model.parameters()):
            return model
        options = pick_handler(self.handlers, DistributedDataParallelKwargs)
        device_ids = None if given.device is None else devices.wrapper_device_ids(given.device)
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **options.to_kwargs())
        options.register_comm_hook(wrapped)

        def wrap_again(wrapped: Any) -> None:
            # In place: the user's names, and the Accelerator, refer to this very object.
            inner, training = wrapped.module, wrapped.training
            wrapped.__init__(inner, device_ids=device_ids, **options.to_kwargs())
            wrapped.training = training
            options.register_comm_hook(wrapped)

        note_wrapped(wrapped, wrap_again)
        return wrapped
