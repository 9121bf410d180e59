"""Probes of libraries, versions and the machine agree with Accelerate's here."""

from __future__ import annotations

import inspect
import os
import platform
import warnings

import pytest
import torch
from accelerate import utils as peer

from notebook_accel.errors import ConfigError
from notebook_accel.training import availability, devices, environment, host, versions

PROBES = sorted(
    name for name in availability.__all__ if name.startswith("is_") and name.endswith("available")
)


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_agrees_with_accelerate(name: str) -> None:
    ours, theirs = getattr(availability, name), getattr(peer.imports, name)
    assert ours() == bool(theirs())
    for argument, parameter in inspect.signature(theirs).parameters.items():
        if parameter.default is False:
            assert ours(**{argument: True}) == bool(theirs(**{argument: True}))


@pytest.mark.parametrize("operation", ["==", "!=", ">", ">=", "<", "<="])
@pytest.mark.parametrize("version", ["1.0", "2.6.0", "99"])
def test_versions_are_compared_as_accelerate_compares_them(operation: str, version: str) -> None:
    assert versions.compare_versions("numpy", operation, version) == (
        peer.compare_versions("numpy", operation, version)
    )
    assert versions.is_torch_version(operation, version) == (
        peer.is_torch_version(operation, version)
    )


def test_a_comparison_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="=>"):
        versions.compare_versions("numpy", "=>", "1")
    with pytest.raises(ValueError):
        peer.compare_versions("numpy", "=>", "1")
    assert environment.are_libraries_initialized("torch", "nothing") == ["torch"]


def test_an_old_kernel_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    for release in ("5.5.0-1-generic", "6.17.0"):
        monkeypatch.setattr(platform, "release", lambda release=release: release)
        host.check_os_kernel()
        assert not caplog.records
    monkeypatch.setattr(platform, "release", lambda: "5.4.0-1-generic")
    host.check_os_kernel()
    assert "5.4.0" in caplog.text


def test_lists_of_cores_are_read_and_no_device_means_nothing() -> None:
    assert host.parse_cores("0-3,8\n") == {0, 1, 2, 3, 8}
    assert host.parse_cores("\n") == set()
    if not torch.cuda.is_available():
        host.set_numa_affinity(0, verbose=True)


@pytest.mark.parametrize("batch_size", [5, 1])
def test_inputs_are_filled_up_as_accelerate_fills_them(batch_size: int) -> None:
    from notebook_accel.training.nested import convert_outputs_to_fp32, pad_input_tensors

    data = {"a": torch.arange(batch_size), "b": [torch.ones(batch_size, 2)]}
    ours, theirs = (pad(data, batch_size, 2) for pad in (pad_input_tensors, peer.pad_input_tensors))
    assert torch.equal(ours["a"], theirs["a"])
    assert torch.equal(ours["b"][0], theirs["b"][0])
    assert len(pad_input_tensors(torch.ones(6), 6, 2)) == 6, "theirs adds one that is not needed"
    half = convert_outputs_to_fp32(lambda x: {"y": x.half()})(torch.ones(1))
    assert half["y"].dtype == torch.float32


def give_devices(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let torch see CUDA devices of these names."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: object())


def test_a_driver_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a training that should be on a GPU would begin on the CPU without a word."""

    def refuse() -> bool:
        text = "CUDA initialization: The NVIDIA driver on your system is too old (found 11040)."
        warnings.warn(f"{text} (Triggered internally at CUDAFunctions.cpp:108.)", stacklevel=1)
        return False

    give_devices(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "is_available", refuse)
    found = devices.inventory()
    assert (found.kind, found.names) == ("cpu", ())
    assert found.problem.endswith("is too old (found 11040).")


@pytest.mark.parametrize(
    ("name", "number", "can", "needs"),
    [
        ("NVIDIA GeForce RTX 4090", 2, False, True),
        ("NVIDIA GeForce RTX 4090", 2, True, False),
        ("NVIDIA GeForce RTX 4090", 1, False, False),
        ("NVIDIA H200", 2, False, False),
    ],
)
def test_devices_that_cannot_speak_to_each_other_go_by_the_host(
    name: str, number: int, can: bool, needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_devices(monkeypatch, *[name] * number)
    monkeypatch.setattr(devices, "check_cuda_p2p_ib_support", lambda: can)
    found = devices.inventory()
    assert (found.kind, found.names, found.problem) == ("cuda", (name,) * number, "")
    assert found.environment == ({"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"} if needs else {})


def test_a_probe_does_not_wake_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Accelerate's: a process that is forked from one that did could use no device."""
    asked: list[str | None] = []

    def is_available() -> bool:
        asked.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
        return True

    give_devices(monkeypatch, "NVIDIA H200")
    monkeypatch.setattr(torch.accelerator, "is_available", is_available)
    assert availability.is_cuda_available()
    assert asked == ["1"]
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


def test_cores_near_a_device_need_a_torch_that_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Older ones lack it: asked to stay near its device, a rank stays where it is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: object())
    before = os.sched_getaffinity(0)
    host.set_numa_affinity(0)
    assert os.sched_getaffinity(0) == before
