"""Building a model on a device of choice, or without weights (on the meta device)."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from notebook_accel.training import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.nn import Module

__all__ = ["init_empty_weights", "init_on_device"]

_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full}


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """A block in which modules are made without memory for their weights.

    Args:
        include_buffers: leave out the buffers too; None reads ``ACCELERATE_INIT_INCLUDE_BUFFERS``,
            and keeps them where that is not set.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(
    device: torch.device | str | int, include_buffers: bool | None = None
) -> Iterator[None]:
    """A block in which modules are made on a device.

    Parameters that are tied in the block stay tied.

    Args:
        device: of their parameters.
        include_buffers: of their buffers too; None as of :func:`init_empty_weights`.
    """
    if include_buffers is None:
        include_buffers = environment.read_flag("INIT_INCLUDE_BUFFERS")
    target = torch.device(device)
    with ExitStack() as stack:
        hook = torch_module.register_module_parameter_registration_hook(_parameter_mover(target))
        stack.callback(hook.remove)
        if include_buffers:
            hook = torch_module.register_module_buffer_registration_hook(_buffer_mover(target))
            stack.callback(hook.remove)
            # Not `with torch.device(...)`: it would also catch the small tensors with which a
            # constructor only computes (a schedule's `linspace(...).tolist()`).
            stack.enter_context(_FactoriesOn(target))
        yield


class _FactoriesOn(TorchFunctionMode):
    """Makes what ``torch.empty`` and its like make on a device, unless the call names another."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES and kwargs.get("device") is None:
            kwargs["device"] = self.device
        return func(*args, **kwargs)


def _parameter_mover(device: torch.device) -> Callable[[Module, str, Any], Any]:
    def move(_: Module, __: str, parameter: Any) -> Any:
        if parameter is None or parameter.device == device:
            return None  # keep it, and with it what else is tied to it
        own = vars(parameter)  # what a parameter of a class of its own was made with
        kind = type(parameter)
        return kind(parameter.to(device), requires_grad=parameter.requires_grad, **own)

    return move


def _buffer_mover(device: torch.device) -> Callable[[Module, str, Any], Any]:
    def move(_: Module, __: str, buffer: Any) -> Any:
        return None if buffer is None or buffer.device == device else buffer.to(device)

    return move
