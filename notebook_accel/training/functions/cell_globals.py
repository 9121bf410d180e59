"""Names that cells on the ranks have from the start.

A cell that imports ``accelerator`` from here makes it then and not before: one that does not speak
of an accelerator gets no process group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.launch.rank import current

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from notebook_accel.training.accelerator import Accelerator

__all__ = ["accelerator", "device", "rank", "world_size"]  # noqa: F822


def _rank() -> int:
    return current().rank


def _world_size() -> int:
    return current().world_size


def _device() -> torch.device:
    from notebook_accel.training.processes import devices
    from notebook_accel.training.settings import environment

    return devices.choose_device(
        cpu=environment.read_flag("USE_CPU"), local_rank=current().device_index, shared=True
    )


def _accelerator() -> Accelerator:
    from notebook_accel.training.accelerator import Accelerator

    return Accelerator()


_MAKERS: dict[str, Callable[[], Any]] = {
    "accelerator": _accelerator,
    "device": _device,
    "rank": _rank,
    "world_size": _world_size,
}


def __getattr__(name: str) -> Any:
    if name not in _MAKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _MAKERS[name]()
