"""Names that notebook cells on the ranks can use without defining them.

They are ``rank``, ``world_size``, ``device`` and ``accelerator``. Each value is made when it is
read. ``accelerator`` is read only for cells that use this name, since an ``Accelerator`` makes a
process group.
"""

from __future__ import annotations

from typing import Any

from notebook_accel.rank.this_rank import current


def __getattr__(name: str) -> Any:
    if name == "rank":
        return current().rank
    if name == "world_size":
        return current().world_size
    if name == "device":
        from notebook_accel.training.processes import devices
        from notebook_accel.training.settings import environment

        return devices.choose_device(
            cpu=environment.read_flag("USE_CPU"), local_rank=current().local_rank, shared=True
        )
    if name == "accelerator":
        from notebook_accel.training.accelerator import Accelerator

        return Accelerator()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
