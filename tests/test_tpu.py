"""TPUs are found, or refused, by what machine and packages say; torch_xla is never imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from notebook_accel import ConfigError, LaunchConfig, LaunchError, notebook_launcher, tpu
from notebook_accel.launch import doctor
from notebook_accel.launch.engines import engine_named
from notebook_accel.launch.engines.local import LocalEngine
from notebook_accel.launch.engines.xla import XlaEngine

if TYPE_CHECKING:
    from pathlib import Path

V3, V5E = "0x0027", "0x0063"


@pytest.fixture
def chips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The PCI bus: a folder of it, which tests fill."""
    monkeypatch.setattr(tpu, "_PCI", tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    return tmp_path


def put(bus: Path, *kinds: str) -> None:
    for number, kind in enumerate(kinds):
        slot = bus / f"0000:00:{number:02x}.0"
        slot.mkdir()
        (slot / "vendor").write_text("0x1ae0\n")
        (slot / "device").write_text(f"{kind}\n")


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(tpu, "_version", versions.get)


def test_a_chip_of_v3_has_two_devices(chips: Path) -> None:
    put(chips, V3, V3, V3, V3)
    assert tpu.count_devices({}) == ("TPU", 8)


def test_the_variable_decides(chips: Path) -> None:
    put(chips, V5E)
    assert tpu.count_devices({}) == ("TPU", 1)
    assert tpu.count_devices({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}) == ("CPU", 2)


def test_a_machine_without_a_tpu(chips: Path) -> None:
    put(chips, "0x1234")
    assert tpu.count_devices({}) == ("", 0)


def test_a_pair_that_does_not_fit(chips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(chips, V5E)
    install(monkeypatch, torch="2.13.0+cpu", torch_xla="2.9.0")
    found = tpu.library()
    assert found is not None
    assert "'torch==2.9.*' 'torch_xla==2.9.*'" in found.problem
    assert type(engine_named("auto")) is LocalEngine
    with pytest.raises(LaunchError, match=r"built for torch 2\.9, and torch 2\.13"):
        notebook_launcher(print, engine="xla")
    (finding,) = doctor._tpus(None)  # type: ignore[arg-type]
    assert (finding.level, finding.remedy) == (doctor.HURTS, found.problem)


def test_one_that_fits_is_chosen(chips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(chips, V5E)
    install(monkeypatch, torch="2.9.1", torch_xla="2.9.0")
    assert type(engine_named("auto")) is XlaEngine
    (finding,) = doctor._tpus(None)  # type: ignore[arg-type]
    assert (finding.level, finding.found) == (doctor.FINE, "devices of TPU: 1; torch_xla 2.9.0")


def test_torch_tpu_needs_no_engine(chips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(chips, V5E)
    install(monkeypatch, torch="2.13.0", torch_tpu="0.2.0")
    assert type(engine_named("auto")) is LocalEngine
    with pytest.raises(LaunchError, match="leave engine= out"):
        notebook_launcher(print, engine="xla")


def test_what_is_missing_is_named(chips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(chips, V5E)
    install(monkeypatch, torch="2.13.0")
    with pytest.raises(LaunchError, match=r"pip install 'notebook-accel\[tpu\]'"):
        notebook_launcher(print, engine="xla")


def test_a_number_that_torch_xla_does_not_know(
    chips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(chips, *[V5E] * 8)
    install(monkeypatch, torch="2.9.0", torch_xla="2.9.0")
    with pytest.raises(ConfigError, match="1 rank or one for each of the 8 devices"):
        notebook_launcher(print, config=LaunchConfig(engine="xla", num_processes=4))
    monkeypatch.setattr(tpu, "_PCI", chips / "empty")
    with pytest.raises(LaunchError, match="found no TPU"):
        notebook_launcher(print, engine="xla")


def test_what_torch_tpu_says_without_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "_ASK_TORCH_TPU", "raise ValueError('no TPU devices found')")
    with pytest.raises(LaunchError, match="2 ranks: ValueError: no TPU devices found"):
        tpu.launch_variables({}, 2)


def test_what_torch_tpu_decides_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "import json; print('noise'); print(json.dumps({'TORCH_TPU_TOPOLOGY': '2,2,1'}))"
    monkeypatch.setattr(tpu, "_ASK_TORCH_TPU", told)
    assert tpu.launch_variables({}, 2) == {"TORCH_TPU_TOPOLOGY": "2,2,1"}
    assert "torch_xla" not in sys.modules
