"""Which accelerators a trial gets: those that no run of this kernel uses, unless it is to share.

On a Ray cluster, Ray chooses them; a trial begins when there is room for all its ranks.
"""

from __future__ import annotations

from notebook_accel.config import LaunchConfig
from notebook_accel.config.checks import check_enough
from notebook_accel.errors import ConfigError
from notebook_accel.launch import run_list
from notebook_accel.launch.engines.ray import num_places
from notebook_accel.launch.machine import look_at_machine
from notebook_accel.launch.rank_environment import VISIBLE_OF_KIND


class Leases:
    """The accelerators or cores of a sweep, of which each trial gets ``num_processes``.

    Attributes:
        at_a_time: how many trials fit at a time.
        awaited: the runs that use what a trial waits for; "" while none waits.
        can_pause: whether a paused trial leaves its place to another one.
    """

    can_pause = True

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
        self.awaited = ""
        self._shares = concurrent is not None and concurrent > fit
        self.at_a_time = concurrent or fit
        self.num_threads = max(1, machine.num_cores // (self.at_a_time * self._ranks))

    def take(self, own: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        """Return the accelerators of a trial; () if it needs no choice; None if none are free.

        The caller holds ``run_list.choosing`` until the trial is launched, or goes on; its end or
        pause frees them.

        Args:
            own: those of a paused trial, which are the only ones that it can go on with.
        """
        among, number = (self._devices, self._ranks) if own is None else (own, len(own))
        taken, users = run_list.least_used(among, number)
        self.awaited = "" if self._shares else ", ".join(dict.fromkeys(run.name for run in users))
        return None if self.awaited else taken


class RayLeases(Leases):
    """The places of a Ray cluster."""

    # A paused trial would keep its place.
    can_pause = False

    def __init__(self, config: LaunchConfig, concurrent: int | None) -> None:
        """Count the places.

        Raises:
            ConfigError: a trial needs more than there are.
            LaunchError: Ray is not installed.
        """
        self._config, self._ranks = config, config.num_processes or 1
        total, _ = num_places(config)
        if self._ranks > total:
            raise ConfigError(
                f"num_processes={self._ranks}, and the Ray cluster has room for {total} ranks"
            )
        self.at_a_time = concurrent or total // self._ranks
        self.awaited, self.num_threads = "", 1

    def take(self, own: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        has_room = num_places(self._config)[1] >= self._ranks
        self.awaited = "" if has_room else "others on the Ray cluster"
        return () if has_room else None


# By the name of the engine.
LEASES: dict[str, type[Leases]] = {"auto": Leases, "local": Leases, "ray": RayLeases}
