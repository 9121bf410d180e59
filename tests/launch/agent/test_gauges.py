"""The device of a rank: CUDA's number of it is not always NVML's."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from notebook_accel.launch import wire
from notebook_accel.launch.agent import gauges
from notebook_accel.launch.agent.gauges import Gauges, gauges_of

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
    machine: list[str],
    called: str,
    is_pci_order: bool,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for nvidia-ml-py, by its names, since NVML answers only where a device is."""

    def use(handle: int) -> Any:
        return SimpleNamespace(gpu=40 + handle)

    nvml = SimpleNamespace(
        nvmlDeviceGetCount=lambda: len(machine),
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-")),
        nvmlDeviceGetName=lambda handle: machine[handle],
        nvmlDeviceGetUtilizationRates=use,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [],
    )
    monkeypatch.setattr(gauges, "_nvml", lambda: nvml)
    one = Gauges(os.getpid(), nvidia=called, is_pci_order=is_pci_order)
    one.read(1.0)
    assert one.device == shown
    assert one.device_use == (41 if shown else None)


def test_without_nvml_a_device_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "_nvml", lambda: None)
    for called in ("0", "GPU-0", "MIG-0"):
        one = Gauges(os.getpid(), nvidia=called)
        one.read(1.0)
        assert (one.device, one.device_use) == ("", None)


@pytest.mark.parametrize(
    ("visible", "rank", "called"),
    [(None, 1, "1"), ("4,5", 1, "5"), ("4,5", 2, "4"), ("4, GPU-5", 1, "GPU-5"), ("", 0, None)],
)
def test_ranks_have_the_visible_devices_in_turn(
    visible: str | None, rank: int, called: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "exists", lambda _: True)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    launch = cast("wire.Launch", SimpleNamespace(environment=environment))
    assert gauges_of(launch, wire.RankSpec(rank=rank, local_rank=rank), 1).nvidia == called
