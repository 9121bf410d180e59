"""Write a checkpoint in the background, while the training goes on.

::

    rank             copies its pieces to the host          next step, next step, ...
    a thread of it    '--> writes the copies, waits for the other ranks, publishes
"""

from __future__ import annotations

import atexit
import contextvars
import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from notebook_accel.errors import NotebookAccelError
from notebook_accel.private import of_torch
from notebook_accel.training.checkpoint.saves import JointSave, RankZeroSave, describe
from notebook_accel.training.collectives.nested import leaves
from notebook_accel.training.processes import devices
from notebook_accel.training.settings.notices import notice

# The longest that an interrupt goes unheard while the rank waits for the thread.
_SLICE_SECONDS = 0.1


class BackgroundSave:
    """A thread of this rank that writes and publishes a checkpoint, started by the constructor."""

    def __init__(
        self, save: JointSave | RankZeroSave, finish: Callable[[], None], device: torch.device
    ) -> None:
        self.final = save.final
        self._error: BaseException | None = None

        def run() -> None:
            try:
                try:
                    devices.make_current(device)
                    finish()
                except BaseException as error:
                    save.fail(error)
                    raise
            except BaseException as error:
                self._error = error
                notice(f"{self.final} could not be written: {describe(error)}")

        target = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=target, args=(run,), name="notebook_accel save", daemon=True
        )
        # A script that ends without waiting ends once its last checkpoint is in its place.
        atexit.register(self._thread.join)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is complete; raise ``NotebookAccelError`` if it is not."""
        while self._thread.is_alive():  # in slices, so that an interrupt is heard
            self._thread.join(_SLICE_SECONDS)
        atexit.unregister(self._thread.join)
        if self._error is not None:
            raise NotebookAccelError(
                f"{self.final} could not be written: {describe(self._error)}. Earlier checkpoints "
                "are as they were"
            ) from self._error


def host_copies(state: Any) -> Any:
    """Return a copy of nested ``state`` on the host; tensors that shared memory share it there.

    Where there is an accelerator, its memory is pinned; torch keeps that for the next copy.
    """
    pins = torch.accelerator.is_available()
    storages: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    def copy_of(value: torch.Tensor) -> torch.Tensor:
        loaded = sys.modules.get("torch.distributed.tensor")
        if loaded is not None and isinstance(value, loaded.DTensor):
            # Not from_local: it would put the part back on the mesh's device.
            return of_torch.at_other_device(value, copy_of(value.to_local()))
        value, source = value.detach(), value.untyped_storage()
        key = value.device, source.data_ptr()
        if key not in storages:
            room = torch.empty(source.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pins)
            storages[key] = room.untyped_storage()
            storages[key].copy_(source, non_blocking=True)
        new = torch.empty(0, dtype=value.dtype, device="cpu")
        return new.set_(storages[key], value.storage_offset(), value.shape, value.stride())

    tensors = [leaf for leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
    known: dict[int, Any] = {id(tensor): copy_of(tensor) for tensor in tensors}
    if tensors and pins:
        torch.accelerator.synchronize()
    return copy.deepcopy(state, known)
