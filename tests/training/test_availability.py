"""Probes of libraries, versions and the machine agree with Accelerate's here."""

from __future__ import annotations

import importlib.util
import inspect
import os
import platform
import sys
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import utils as peer

from notebook_accel.errors import ConfigError
from notebook_accel.training import availability, devices, environment, host, versions

if TYPE_CHECKING:
    from pathlib import Path

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


# What is imported, the name under which it is installed, and versions of it.
LIBRARIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "is_aim_available": ("aim", "aim", ("3.29.1", "4.0.0")),
    "is_boto3_available": ("boto3", "boto3", ("1.2",)),
    "is_clearml_available": ("clearml", "clearml", ("2.1",)),
    "is_comet_ml_available": ("comet_ml", "comet-ml", ("3.58",)),
    "is_datasets_available": ("datasets", "datasets", ("4.0",)),
    "is_deepspeed_available": ("deepspeed", "deepspeed", ("0.19",)),
    "is_dvclive_available": ("dvclive", "dvclive", ("3.49",)),
    "is_fp8_available": ("msamp", "ms-amp", ("0.4",)),
    "is_import_timer_available": ("import_timer", "import-timer", ("1.0",)),
    "is_lomo_available": ("lomo_optim", "lomo-optim", ("0.1",)),
    "is_msamp_available": ("msamp", "ms-amp", ("0.4",)),
    "is_pynvml_available": ("pynvml", "nvidia-ml-py", ("12.0",)),
    "is_sagemaker_available": ("sagemaker", "sagemaker", ("2.0",)),
    "is_schedulefree_available": ("schedulefree", "schedulefree", ("1.4",)),
    "is_swanlab_available": ("swanlab", "swanlab", ("0.10",)),
    "is_timm_available": ("timm", "timm", ("1.0",)),
    "is_torchao_available": ("torchao", "torchao", ("0.6.0", "0.6.1", "0.10.0")),
    "is_torchvision_available": ("torchvision", "torchvision", ("0.20",)),
    "is_trackio_available": ("trackio", "trackio", ("0.5",)),
    "is_transformer_engine_available": ("transformer_engine", "transformer-engine", ("2.0",)),
    "is_triton_available": ("triton", "triton", ("3.0",)),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_there_once_it_is_installed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that it left where it ran, or a user's module of its name, is not the library."""
    module, package, found_versions = LIBRARIES[name]
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    ours, theirs = getattr(availability, name), getattr(peer.imports, name)

    def answers_in(folder: Path) -> bool:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            found = ours()
            assert found == bool(theirs())
        return bool(found)

    (tmp_path / "left" / module).mkdir(parents=True)
    assert not answers_in(tmp_path / "left")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / f"{module}.py").touch()
    assert not answers_in(tmp_path / "own")
    there = [answers_in(installed(tmp_path, module, package, each)) for each in found_versions]
    assert any(there)
    assert all(there) == (name not in ("is_aim_available", "is_torchao_available"))


def installed(folder: Path, module: str, package: str, version: str) -> Path:
    """A folder with a library in it, as pip leaves it."""
    here = folder / version
    (here / module).mkdir(parents=True)
    (here / module / "__init__.py").touch()
    facts = here / f"{package.replace('-', '_')}-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return here


@pytest.mark.parametrize("version", ["0.7.0", "0.8.0"])
def test_megatron_is_there_where_it_is_asked_for(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = installed(tmp_path, "megatron", "megatron-core", version)
    (here / "megatron" / "training").mkdir()
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setitem(sys.modules, "megatron", SimpleNamespace())  # taken out again at the end
    del sys.modules["megatron"]
    for asked, expected in (("false", False), ("true", version == "0.8.0")):
        monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", asked)
        assert availability.is_megatron_lm_available() is expected
        assert bool(peer.imports.is_megatron_lm_available()) is expected


def test_tensorboard_has_a_second_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # type: ignore[arg-type]
    assert not availability.is_tensorboard_available()
    monkeypatch.syspath_prepend(str(installed(tmp_path, "tensorboardX", "tensorboardX", "2.6")))
    assert availability.is_tensorboard_available() is peer.imports.is_tensorboard_available()
    assert availability.is_tensorboard_available()


def test_torch_xla_may_be_left_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed(tmp_path, "torch_xla", "torch_xla", "2.9")))
    assert availability.is_torch_xla_available()
    for kind, tpu, gpu in (("TPU", True, False), ("CUDA", False, True), ("CPU", False, False)):
        runtime = SimpleNamespace(device_type=lambda kind=kind: kind)
        monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)  # type: ignore[arg-type]
        assert availability.is_torch_xla_available(check_is_tpu=True) is tpu
        assert availability.is_torch_xla_available(check_is_gpu=True) is gpu
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    assert not availability.is_torch_xla_available()


def test_devices_that_lack_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "is_habana_gaudi1", lambda: True)
    assert not availability.is_fp16_available()
    monkeypatch.setattr(availability, "_has_device", lambda kind: kind == "mps")
    for version in (13, 14):
        newest = (version, 0)
        monkeypatch.setattr(
            torch.backends.mps,
            "is_macos_or_newer",
            lambda *wanted, newest=newest: wanted <= newest,
        )
        assert availability.is_bf16_available() is (version == 14)


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


def test_a_rank_is_kept_on_the_cores_near_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x65, pci_device_id=2)
    (tmp_path / "0000:65:02.0").mkdir()
    (tmp_path / "0000:65:02.0" / "local_cpulist").write_text("1-2,9\n")
    kept: list[Any] = []
    monkeypatch.setattr(host, "_PCI", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: device}.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *where: kept.append(where))
    caplog.set_level("INFO")
    host.set_numa_affinity(1)
    assert kept == [(0, {1, 2})]
    assert not caplog.records
    host.set_numa_affinity(1, verbose=True)
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    host.set_numa_affinity(1)
    assert [record.getMessage() for record in caplog.records] == [
        "local rank 1 runs on the cores [1, 2]"
    ] * 2
    (tmp_path / "0000:65:02.0" / "local_cpulist").write_text("8\n")
    host.set_numa_affinity(1)
    assert len(kept) == 3, "a process that may use none of them stays where it is"
