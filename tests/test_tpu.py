"""TPUs are found, or refused, by what machine and packages say; torch_xla is never imported."""

import os
from html import unescape

import pytest

from notebook_accel import (
    ConfigError,
    LaunchConfig,
    LaunchError,
    config_picker,
    notebook_launcher,
    tpu,
)
from notebook_accel.launch import doctor
from notebook_accel.launch.engines import engine_for, local
from notebook_accel.launch.engines.local import LocalEngine
from notebook_accel.launch.engines.xla import XlaEngine
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.preflight import look_at_machine
from notebook_accel.notebook.picker import devices_line
from notebook_accel.wire import Devices
from tests.interpreters import run_script

V3, V5E = "0x0027", "0x0063"


@pytest.fixture
def chips(tmp_path, monkeypatch):
    """The PCI bus: a folder of it, which tests fill."""
    monkeypatch.setattr(tpu, "_PCI", tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    return tmp_path


def put(bus, *kinds):
    for number, kind in enumerate(kinds):
        slot = bus / f"0000:00:{number:02x}.0"
        slot.mkdir()
        (slot / "vendor").write_text("0x1ae0\n")
        (slot / "device").write_text(f"{kind}\n")


def install(monkeypatch, **versions):
    monkeypatch.setattr(tpu, "_version", versions.get)


def test_a_chip_of_v3_has_two_devices(chips):
    put(chips, V3, V3, V3, V3)
    assert tpu.count_devices({}) == ("TPU", 8)


def test_the_variable_decides(chips):
    put(chips, V5E)
    assert tpu.count_devices({}) == ("TPU", 1)
    assert tpu.count_devices({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}) == ("CPU", 2)


def test_a_machine_without_a_tpu(chips):
    put(chips, "0x1234")
    assert tpu.count_devices({}) == ("", 0)


def test_a_pair_that_does_not_fit(chips, monkeypatch):
    put(chips, V5E)
    install(monkeypatch, torch="2.13.0+cpu", torch_xla="2.9.0")
    found = tpu.library()
    assert "'torch==2.9.*' 'torch_xla==2.9.*'" in found.problem
    assert type(engine_for(LaunchConfig())) is LocalEngine
    with pytest.raises(LaunchError, match=r"built for torch 2\.9, and torch 2\.13"):
        notebook_launcher(print, engine="xla")
    (finding,) = doctor._tpus(None)
    assert (finding.level, finding.remedy) == (doctor.HURTS, found.problem)


def test_one_that_fits_is_chosen(chips, monkeypatch):
    put(chips, V5E)
    install(monkeypatch, torch="2.9.1", torch_xla="2.9.0")
    assert type(engine_for(LaunchConfig())) is XlaEngine
    (finding,) = doctor._tpus(None)
    assert (finding.level, finding.found) == (doctor.FINE, "devices of TPU: 1; torch_xla 2.9.0")
    assert "TPU (devices: 1) by torch_xla 2.9.0" in devices_line(
        look_at_machine(Devices(kind="cpu"))
    )
    assert type(engine_for(LaunchConfig(devices="cpu"))) is LocalEngine


@pytest.mark.parametrize(
    ("libraries", "said"),
    [({"torch_tpu": "0.2.0"}, "leave engine= out"), ({}, r"pip install 'notebook-accel\[tpu\]'")],
)
def test_without_torch_xla_there_is_no_engine_of_it(chips, monkeypatch, libraries, said):
    put(chips, V5E)
    install(monkeypatch, torch="2.13.0", **libraries)
    assert type(engine_for(LaunchConfig())) is LocalEngine
    with pytest.raises(LaunchError, match=said):
        notebook_launcher(print, engine="xla")


def test_a_number_that_torch_xla_does_not_know(chips, monkeypatch):
    put(chips, *[V5E] * 8)
    install(monkeypatch, torch="2.9.0", torch_xla="2.9.0")
    with pytest.raises(ConfigError, match="1 rank or one for each of the 8 devices"):
        notebook_launcher(print, config=LaunchConfig(engine="xla", num_processes=4))
    monkeypatch.setattr(tpu, "_PCI", chips / "empty")
    with pytest.raises(LaunchError, match="found no TPU"):
        notebook_launcher(print, engine="xla")


def test_the_form_says_where_xla_cannot_run(chips, monkeypatch):
    put(chips, V5E)
    install(monkeypatch, torch="2.9.0")
    picker = config_picker({"engine": "xla"})
    row = picker._rows["engine"]
    assert "needs torch_xla, which is not installed" in unescape(row._note.value)
    install(monkeypatch, torch="2.9.0", torch_xla="2.9.0")
    row.value = None
    row.value = "xla"
    assert "na-wrong" not in row._note.value
    picker._rows["num_processes"].value = 4
    assert "1 rank or one for each of the 1 devices" in picker._rows["num_processes"]._note.value
    monkeypatch.setattr(tpu, "_PCI", chips / "empty")
    picker._rows["num_processes"].value = None
    assert "found no TPU" in row._note.value


def test_what_torch_tpu_says_without_a_tpu(monkeypatch):
    monkeypatch.setattr(tpu, "_ASK_TORCH_TPU", "raise ValueError('no TPU devices found')")
    with pytest.raises(LaunchError, match="2 ranks: ValueError: no TPU devices found"):
        tpu.launch_variables({}, 2)


def test_torch_tpu_that_says_nothing(monkeypatch):
    monkeypatch.setattr(tpu, "_ASK_TORCH_TPU", "import time; time.sleep(600)")
    monkeypatch.setattr(tpu, "_ASK_SECONDS", 0.2)
    with pytest.raises(LaunchError, match=r"prepare 2 ranks: .*timed out"):
        tpu.launch_variables({}, 2)


def test_what_torch_tpu_decides_reaches_the_ranks(monkeypatch):
    told = "import json; print('noise'); print(json.dumps({'TORCH_TPU_TOPOLOGY': '2,2,1'}))"
    monkeypatch.setattr(tpu, "_ASK_TORCH_TPU", told)
    found = Devices(kind="tpu", names=("TPU v6e", "TPU v6e"))
    monkeypatch.setattr(local, "ask_template", lambda *_: found)
    request = LaunchRequest(name="train", config=LaunchConfig())
    plan = LocalEngine().plan_ranks(request)
    assert plan.world_size == 2
    assert plan.environment == {"TORCH_TPU_TOPOLOGY": "2,2,1"}


# Like torch_tpu, it is loaded with `import torch`, and it says in which process.
STAND_IN = """
import os
with open(os.environ["LOADED_IN"], "a") as file:
    file.write(f"{os.getpid()}\\n")

def load():
    pass
"""
KERNEL = """
import os, sys
from notebook_accel import notebook_launcher
from notebook_accel.launch.template.handle import template

def train():
    return os.getpid()

pids = notebook_launcher(train, num_processes=2, view="none").results
print(os.getpid(), template().pid, "torch_tpu" in sys.modules)
"""


def test_neither_kernel_nor_template_loads_torch_tpu(tmp_path):
    (tmp_path / "torch_tpu.py").write_text(STAND_IN)
    about = tmp_path / "torch_tpu-0.2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\ntorch_tpu = torch_tpu:load\n")
    loaded = tmp_path / "loaded"
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    told = run_script(KERNEL, PYTHONPATH=path, LOADED_IN=str(loaded)).split()
    seen = loaded.read_text().split()
    assert len(seen) == 1, "the child that was asked for devices"
    assert not {*told} & {*seen}
    assert told[-1] == "False"
