"""The device of a rank: CUDA's number of it is not always NVML's."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from notebook_accel.launch.agent import gauges
from notebook_accel.launch.agent.gauges import Gauges

ALIKE, MIXED = ["A100", "A100"], ["T4", "A100"]
DEVICES = pytest.mark.parametrize(
    ("machine", "called", "is_pci_order", "shown"),
    [
        (ALIKE, "1", False, "A100"),
        (MIXED, "1", True, "A100"),
        # The fastest first: CUDA's device 1 is NVML's device 0.
        (MIXED, "1", False, ""),
        (MIXED, "GPU-1", False, "A100"),
        # More ranks than devices share them, each with its number.
        (ALIKE, "3", False, "A100"),
    ],
)


@DEVICES
def test_a_device_that_may_be_another_one_is_not_shown(
    machine, called, is_pci_order, shown, monkeypatch
):
    """A stand-in for nvidia-ml-py, by its names, since NVML answers only where a device is."""

    monkeypatch.setattr(gauges, "_nvml", lambda: nvml_of(machine))
    one = gauges_of(called, monkeypatch, CUDA_DEVICE_ORDER="PCI_BUS_ID" * is_pci_order)
    read(one)
    assert one.measured.get("device") == shown
    assert one.measured.get("device_use") == (41 if shown else None)


def gauges_of(visible, monkeypatch, **more):
    monkeypatch.setattr(os.path, "exists", lambda _: True)
    return Gauges({"CUDA_VISIBLE_DEVICES": visible, **more}, 0, os.getpid())


def nvml_of(machine, **more):
    def use(handle):
        return SimpleNamespace(gpu=40 + handle)

    names = {
        "nvmlDeviceGetCount": lambda: len(machine),
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid.removeprefix("GPU-")),
        "nvmlDeviceGetName": lambda handle: machine[handle],
        "nvmlDeviceGetUtilizationRates": use,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
    }
    return SimpleNamespace(**names | more)


def read(one):
    one.read(1.0)
    for thread in threading.enumerate():
        if thread.name == "notebook_accel nvml":
            thread.join(60)


def test_a_driver_that_hangs_holds_nobody_up(monkeypatch):
    answer = threading.Event()

    def hang():
        assert answer.wait(100)
        return nvml_of(ALIKE)

    monkeypatch.setattr(gauges, "_nvml", hang)
    one = gauges_of("0", monkeypatch)
    began = time.monotonic()
    one.read(1.0)
    one.read(3.0)
    assert time.monotonic() - began < 60
    assert one.measured.get("memory")
    assert one.measured.get("device") == ""
    answer.set()
    read(one)
    assert one.measured.get("device") == "A100"


@pytest.mark.parametrize(
    ("is_inside", "pids", "memory"),
    [
        (False, (0, 7), 100),  # 0 stands for this process
        (False, (7,), None),
        # NVML has the numbers of the host: a process of that number may be somebody else's.
        (True, (0, 7), None),
        (True, (7,), 100),
    ],
)
def test_memory_in_containers_and_on_parts_of_devices(is_inside, pids, memory, monkeypatch):
    def unsupported(handle):
        raise RuntimeError("Not Supported")

    found = [SimpleNamespace(pid=pid or os.getpid(), usedGpuMemory=100) for pid in pids]
    nvml = nvml_of(
        ALIKE,
        nvmlDeviceGetUtilizationRates=unsupported,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: found,
    )
    monkeypatch.setattr(gauges, "_nvml", lambda: nvml)
    monkeypatch.setattr(gauges, "_is_in_container", lambda: is_inside)
    one = gauges_of("0", monkeypatch)
    read(one)
    assert (
        one.measured.get("device"),
        one.measured.get("device_use"),
        one.measured.get("device_memory"),
    ) == ("A100", None, memory)


def test_without_nvml_a_device_has_no_name(monkeypatch):
    monkeypatch.setattr(gauges, "_nvml", lambda: None)
    for called in ("0", "GPU-0", "MIG-0"):
        one = gauges_of(called, monkeypatch)
        read(one)
        assert (one.measured.get("device"), one.measured.get("device_use")) == ("", None)


@pytest.mark.parametrize(
    ("visible", "rank", "called"),
    [(None, 1, "1"), ("4,5", 1, "5"), ("4,5", 2, "4"), ("4, GPU-5", 1, "GPU-5"), ("", 0, None)],
)
def test_ranks_have_the_visible_devices_in_turn(visible, rank, called, monkeypatch):
    monkeypatch.setattr(os.path, "exists", lambda _: True)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert Gauges(environment, rank, 1).nvidia == called
