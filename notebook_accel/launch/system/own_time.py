"""A clock for one process, which stands still while other processes have its processor."""

from __future__ import annotations

import time

import psutil

__all__ = ["OwnTime"]


class OwnTime:
    """The time that a process has had since this was made: that in which it ran, slept or waited
    for anything but a processor.

    The clock looks at the process each time it is read. Where the process is ready to run at that
    moment, only the processor time that it used since the look before counts: it may have waited
    for a processor. Where it sleeps or waits for something else, all of the time since then counts.
    Linux's own count of the time without a processor (``/proc/PID/schedstat``) does not do: it
    grows only when the process gets one again.

    Args:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seconds = 0.0
        self._looked = time.monotonic()
        self._used, _ = self._look()

    def read(self) -> float:
        """The seconds so far; more exact the more often it is read."""
        now = time.monotonic()
        used, is_ready_to_run = self._look()
        self._seconds += used - self._used if is_ready_to_run else now - self._looked
        self._looked, self._used = now, used
        return self._seconds

    def _look(self) -> tuple[float, bool]:
        """Processor seconds that the process has used, and whether it would run now."""
        try:
            process = psutil.Process(self._pid)
            with process.oneshot():
                used = process.cpu_times()
                return used.user + used.system, process.status() == psutil.STATUS_RUNNING
        except psutil.Error:
            # It has just ended, or belongs to another user now.
            return 0.0, False
