"""Resource use of a rank: CPU time and memory of its process, use and memory of its NVIDIA device.

The agent measures it from outside. psutil reads the process. NVML (the package nvidia-ml-py) reads
the device, without making a CUDA context on it; without NVML the device's values stay unknown. If a
rank reports torch's own count of device memory, the agent reports this count instead of NVML's.

NVML is asked in a thread: a driver that hangs must not keep the agent from ending the ranks. The
agent has forked all its ranks by then.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import psutil

# Between two readings. Processor use is a mean over this time; over a shorter one the values would
# jump, since the system counts in ticks of 10 ms.
_READ_SECONDS = 1.0
# Linux's number of the first namespace of process ids, that of the host.
_PIDS_OF_HOST = "pid:[4026531836]"
_SUSPENDED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@lru_cache(maxsize=1)
def _nvml() -> Any:
    """Return the initialised NVML module; None if it is unavailable."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver that it can speak with
        return None
    return pynvml


def _is_in_container() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") != _PIDS_OF_HOST
    except OSError:  # a sandbox
        return True


class Gauges:
    """CPU, memory and device use of the process of a rank, read at most once a second.

    Attributes:
        measured: what is known by now, by field of ``wire.Usage``; memory of the device is that of
            the process, by NVML.
        nvidia: CUDA's name of the NVIDIA device to read (an index or UUID); None for no device, or
            once NVML has failed.
    """

    def __init__(self, environment: Mapping[str, str], local_rank: int, pid: int) -> None:
        """Set up the gauges of a rank with this environment; values come with :meth:`read`."""
        is_on_cpu = environment.get("ACCELERATE_USE_CPU") == "true"
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        names = [str(local_rank)] if visible is None else visible.split(",")
        # Ranks choose their devices in the same way: with more ranks than devices, some share one.
        name = names[local_rank % len(names)].strip()
        has_device = name and not is_on_cpu and os.path.exists("/dev/nvidiactl")
        self.nvidia = name if has_device else None
        self._is_pci_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        # Two threads add to it.
        self.measured: dict[str, Any] = {"device": "CPU" if is_on_cpu else ""}
        self._pid = pid
        self._handle: Any = None
        self._reading: threading.Thread | None = None
        self._process: psutil.Process | None = None
        self._next = 0.0

    def follow(self, pid: int) -> None:
        self._pid, self._process = pid, None

    def read(self, now: float) -> None:
        """Update the values, unless the last update was less than a second ago.

        CPU use is a mean since the last update; over a shorter time it would be too coarse.
        """
        if now < self._next:
            return
        self._next = now + _READ_SECONDS
        # A process that has just ended has nothing to read; this one may have no descriptor left.
        with contextlib.suppress(psutil.Error, OSError):
            process, self._process = self._process, self._process or psutil.Process(self._pid)
            with self._process.oneshot():
                if memory := self._process.memory_info().rss:
                    self.measured["memory"] = memory
                self.measured["is_suspended"] = self._process.status() in _SUSPENDED
                cpu = self._process.cpu_percent()
            if process is not None:  # the first reading is of no time
                self.measured["cpu"] = round(cpu)
        is_reading = self._reading is not None and self._reading.is_alive()
        if self.nvidia is not None and not is_reading:
            self._reading = threading.Thread(
                target=self._read_device,
                args=(self.nvidia,),
                name="notebook_accel nvml",
                daemon=True,
            )
            self._reading.start()

    def _read_device(self, nvidia: str) -> None:
        nvml = _nvml()
        if nvml is None:
            self.nvidia = None
            return
        try:
            if self._handle is None:
                if not nvidia.isdigit():
                    self._handle = nvml.nvmlDeviceGetHandleByUUID(nvidia)
                else:
                    numbers = range(nvml.nvmlDeviceGetCount())
                    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]
                    names = {nvml.nvmlDeviceGetName(one) for one in handles}
                    # Devices of one kind are equally fast, so that CUDA's order is that of their
                    # slots, too.
                    if not self._is_pci_order and len(names) > 1:
                        raise LookupError("which of NVML's devices is meant is not known")
                    self._handle = handles[int(nvidia) % len(handles)]
                name = nvml.nvmlDeviceGetName(self._handle)
                self.measured["device"] = name.decode() if isinstance(name, bytes) else name
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            if not _is_in_container():
                processes = [one for one in processes if one.pid == self._pid]
            # In a container, NVML has the host's pids: a single process is taken for this one.
            found = [one.usedGpuMemory for one in processes]
            self.measured["device_memory"] = (found[0] or None) if len(found) == 1 else None
        except Exception:  # an old driver: what it cannot say stays unknown
            self.nvidia = None
            self.measured.update(device_use=None, device_memory=None)
            return
        use = None
        with contextlib.suppress(Exception):  # it is not known of a part of a device (MIG)
            use = int(nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        self.measured["device_use"] = use
