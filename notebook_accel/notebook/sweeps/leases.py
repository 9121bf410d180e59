"""Which accelerators the trials of this kernel's sweeps use, so that no two share one unasked."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from notebook_accel.config.checks import check_enough
from notebook_accel.launch.control.environment import VISIBLE_OF_KIND
from notebook_accel.launch.machine import look_at_machine

if TYPE_CHECKING:
    from notebook_accel.config import LaunchConfig

# How many trials use each accelerator, over all sweeps.
_in_use: Counter[int] = Counter()
_lock = threading.Lock()


class Leases:
    """The accelerators or cores of a sweep, of which each trial gets ``num_processes``.

    Attributes:
        at_a_time: how many trials fit at a time.
    """

    def __init__(self, config: LaunchConfig, concurrent: int | None) -> None:
        """Count the accelerators.

        Args:
            config: settings of each trial's launch.
            concurrent: how many trials at a time; None for as many as fit. More than fit share.

        Raises:
            ConfigError: a trial needs more accelerators than there are.
        """
        self._ranks = config.num_processes or 1
        self._devices: tuple[int, ...] = ()
        machine = look_at_machine()
        on_cpu = config.devices == "cpu" or not machine.devices
        if on_cpu:
            fit = max(1, machine.num_cores // self._ranks)
        else:
            chosen = config.devices
            found = tuple(device.index for device in machine.devices)
            devices = chosen if isinstance(chosen, tuple) else found
            check_enough(self._ranks, len(devices), f"each trial can have {len(devices)} at most")
            # Others cannot be told which of their devices to use.
            can_choose = machine.kind == "cuda" or machine.kind in VISIBLE_OF_KIND
            self._devices = devices if can_choose else ()
            fit = len(devices) // self._ranks if can_choose else 1
        self._shares = concurrent is not None and concurrent > fit
        self.at_a_time = concurrent or fit
        self.num_threads = max(1, machine.num_cores // (self.at_a_time * self._ranks))

    def take(self) -> tuple[int, ...] | None:
        """Return the accelerators of a trial; () if it needs no choice; None if none are free."""
        with _lock:
            by_use = sorted(self._devices, key=lambda device: _in_use[device])
            taken = tuple(sorted(by_use[: self._ranks]))
            if not self._shares and any(_in_use[device] for device in taken):
                return None
            _in_use.update(taken)
            return taken

    def give_back(self, devices: tuple[int, ...]) -> None:
        """End a lease."""
        with _lock:
            _in_use.subtract(devices)
