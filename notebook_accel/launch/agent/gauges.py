"""Resource use of a rank: processor time and memory, also of its NVIDIA device.

psutil knows the process. NVML (the package nvidia-ml-py) knows the device without making a context
on it, but of a device's memory torch's own count is taken first, where the rank has one. Without
NVML nothing is known of it.
"""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from notebook_accel.launch import wire

__all__ = ["Gauges", "gauges_of"]

# Between two readings. Processor use is a mean over this time; over a shorter one the values would
# jump, since the system counts in ticks of 10 ms.
_READ_SECONDS = 1.0
_SUSPENDED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def gauges_of(launch: wire.Launch, spec: wire.RankSpec, pid: int | None) -> Gauges:
    """Return the gauges of a rank that was just started."""
    assert pid is not None
    environment = {**launch.environment, **spec.environment}
    if environment.get("ACCELERATE_USE_CPU") == "true":
        return Gauges(pid, name="CPU")
    index = spec.local_rank if spec.device is None else spec.device
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(index)] if visible is None else visible.split(",")
    # Ranks choose their devices in the same way: with more ranks than devices, some share one.
    name = names[index % len(names)].strip()
    return Gauges(
        pid,
        nvidia=name if name and os.path.exists("/dev/nvidiactl") else None,
        is_pci_order=environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID",
    )


@lru_cache(maxsize=1)
def _nvml() -> Any:
    """Return the initialised NVML module; None if it is unavailable."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver that it can speak with
        return None
    return pynvml


class Gauges:
    """CPU, memory and device use of one process, read once a second.

    Attributes:
        memory: resident, in bytes; None while unknown, as are the other numbers.
        cpu: percent of a core, since the reading before.
        device_memory: of the device that the process holds, in bytes, as far as NVML tells.
        device_use: percent of its time in which the device computed.
        device: name of the device for a person; "" while unknown.
        is_suspended: whether SIGSTOP or a debugger holds the process.
    """

    def __init__(
        self, pid: int, *, nvidia: str | None = None, is_pci_order: bool = False, name: str = ""
    ) -> None:
        """Set up the gauges; the first values come with :meth:`read`.

        Args:
            pid: pid of the process.
            nvidia: what CUDA calls its device: its number among all of the machine, or its UUID.
            is_pci_order: whether CUDA numbers devices by their slots, as NVML does; by default it
                has the fastest first.
            name: what a person calls the device.
        """
        self.device = name
        self.memory: int | None = None
        self.cpu: int | None = None
        self.device_memory: int | None = None
        self.device_use: int | None = None
        self.is_suspended = False
        self._pid = pid
        self.nvidia = nvidia
        self._is_pci_order = is_pci_order
        self._handle: Any = None
        self._process: psutil.Process | None = None
        self._next = 0.0
        self._busy = (0.0, 0.0)

    def follow(self, pid: int) -> None:
        """Measure another process from now on."""
        self._pid, self._process, self._busy = pid, None, (0.0, 0.0)

    def read(self, now: float) -> None:
        """Update the values if a second has passed; ``now`` in monotonic seconds."""
        if now < self._next:
            return
        self._next = now + _READ_SECONDS
        # A process that has just ended has nothing to read; this one may have no descriptor left.
        with contextlib.suppress(psutil.Error, OSError):
            self._read_process(now)
        if self.nvidia is not None:
            self._read_device(self.nvidia)

    def _read_process(self, now: float) -> None:
        if self._process is None:
            self._process = psutil.Process(self._pid)
        with self._process.oneshot():
            self.memory = self._process.memory_info().rss or self.memory
            times = self._process.cpu_times()
            self.is_suspended = self._process.status() in _SUSPENDED
        busy = times.user + times.system
        (then, before), self._busy = self._busy, (now, busy)
        if then:
            self.cpu = round(100 * (busy - before) / (now - then))

    def _read_device(self, nvidia: str) -> None:
        nvml = _nvml()
        if nvml is None:
            self.nvidia = None
            return
        try:
            if self._handle is None:
                self._handle = self._find_device(nvml, nvidia)
                name = nvml.nvmlDeviceGetName(self._handle)
                self.device = name.decode() if isinstance(name, bytes) else name
            self.device_use = int(nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            found = [one.usedGpuMemory for one in processes if one.pid == self._pid]
            self.device_memory = next((used for used in found if used), None)
        except Exception:  # a part of a device, an old driver: what it cannot say stays unknown
            self.nvidia = self.device_use = self.device_memory = None

    def _find_device(self, nvml: Any, nvidia: str) -> Any:
        if not nvidia.isdigit():
            return nvml.nvmlDeviceGetHandleByUUID(nvidia)
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())
        ]
        # Devices of one kind are equally fast, so that CUDA's order is that of their slots, too.
        if not self._is_pci_order and len({nvml.nvmlDeviceGetName(one) for one in handles}) > 1:
            raise LookupError("which of NVML's devices is meant is not known")
        return handles[int(nvidia) % len(handles)]
