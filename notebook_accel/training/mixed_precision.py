"""The mixed precision of the newest ``Accelerator``, for code that has none at hand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from notebook_accel.training.precision import autocast_to
from notebook_accel.training.settings import AutocastKwargs
from notebook_accel.training.state import AcceleratorState
from notebook_accel.training.topology import topology

if TYPE_CHECKING:
    from notebook_accel.training.settings import DistributedType

__all__ = ["get_fsdp2_grad_scaler", "get_grad_scaler", "get_mixed_precision_context_manager"]


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any, bool | None]:
    """A context that computes in the mixed precision of the newest ``Accelerator``.

    Args:
        native_amp: False gives a context without effect.
        autocast_kwargs: how ``torch.autocast`` is entered.
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    options = autocast_kwargs or AutocastKwargs()
    return autocast_to(state.mixed_precision, state.device.type, options)


def get_grad_scaler(
    distributed_type: DistributedType | None = None,  # noqa: ARG001
    **kwargs: Any,
) -> torch.amp.GradScaler:
    """A loss scaler for this rank's device.

    Args:
        distributed_type: accepted; ``prepare`` takes the scaler that goes with its strategy.
        **kwargs: arguments of ``torch.amp.GradScaler``.
    """
    return torch.amp.GradScaler(topology().device.type, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """A loss scaler for weights in parts: all ranks agree on whether a step is skipped.

    Args:
        **kwargs: arguments of ``torch.amp.GradScaler``; its device is this rank's unless given.
    """
    # Imported here: torch's sharding costs a second.
    from notebook_accel.training.strategies.dtensors import AgreeingScaler

    return AgreeingScaler(**{"device": topology().device.type, **kwargs})
