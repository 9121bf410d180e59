"""Names that cells on the ranks have from the start.

A cell that imports ``accelerator`` from here makes it then and not before: one that does not speak
of an accelerator gets no process group.
"""

from __future__ import annotations

from typing import Any

from notebook_accel.launch.rank import current

__all__ = ["accelerator", "device", "rank", "world_size"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name == "rank":
        return current().rank
    if name == "world_size":
        return current().world_size
    if name == "device":
        from notebook_accel.training.processes import devices
        from notebook_accel.training.settings import environment

        return devices.choose_device(
            cpu=environment.read_flag("USE_CPU"), local_rank=current().device_index, shared=True
        )
    if name == "accelerator":
        from notebook_accel.training.accelerator import Accelerator

        return Accelerator()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
