"""Probes of libraries, versions and the machine agree with Accelerate's here."""

from __future__ import annotations

import inspect
import platform

import pytest
import torch
from accelerate import utils as peer

from notebook_accel.errors import ConfigError
from notebook_accel.training import availability, environment, host, versions

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
