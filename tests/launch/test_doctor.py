"""What is found on a machine that launches, and on ones that do not."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from notebook_accel.config import default_config_path
from notebook_accel.launch import doctor
from notebook_accel.launch.doctor import FINE, HURTS, STOPS, Finding, as_lines, examine
from notebook_accel.launch.preflight import Machine
from notebook_accel.training.processes import devices
from notebook_accel.wire import Devices

HOST = {"num_cores": 2, "memory": 2**34, "free_memory": 2**33}


@pytest.fixture
def machine(monkeypatch):
    found = Machine(found=Devices(kind="cpu", versions={"torch": "2.13.0"}), **HOST)
    monkeypatch.setattr(doctor, "look_at_machine", lambda: found)
    return found


def about(subject):
    (found,) = [finding for finding in examine() if finding.subject == subject]
    return found


def test_this_machine_can_launch():
    findings = examine()
    assert [finding for finding in findings if finding.level == STOPS] == []
    assert {"system", "devices", "versions", "memory", "/dev/shm"} <= {
        finding.subject for finding in findings
    }
    assert all(bool(finding.remedy) == (finding.level != FINE) for finding in findings)


@pytest.mark.usefixtures("machine")
def test_settings_that_stop_each_launch(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "settings" not in {finding.subject for finding in examine()}
    default_config_path().parent.mkdir(parents=True)
    default_config_path().write_text("num_processes: 0")
    found = about("settings")
    assert found.level == STOPS
    assert str(default_config_path()) in found.found


USAGE = shutil.disk_usage
FREE_MEMORY = f"{doctor.__name__}.free_in_container"


def small_shared_memory(path):
    """As Docker gives it."""
    return SimpleNamespace(total=64 << 20, free=64 << 20) if path == "/dev/shm" else USAGE(path)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("subject", "level", "called", "answer", "found", "remedy"),
    [
        ("/dev/shm", HURTS, "shutil.disk_usage", small_shared_memory, "64 MB of", "--shm-size"),
        ("memory", HURTS, FREE_MEMORY, lambda: 700 << 20, "0.7 GB", "0.25 GB"),
        ("memory", FINE, FREE_MEMORY, lambda: 1 << 62, "GB", ""),
        ("open files", HURTS, "resource.getrlimit", lambda _: (20, 20), "20 at most", "raised"),
        ("runs folder", STOPS, "os.access", lambda *_: False, "be written", "NOTEBOOK_ACCEL_RUNS"),
    ],
)
def test_what_hurts_or_stops_is_named_with_its_remedy(
    subject, level, called, answer, found, remedy, monkeypatch
):
    monkeypatch.setattr(called, answer)
    finding = about(subject)
    assert finding.level == level
    assert found in finding.found
    assert remedy in finding.remedy


@pytest.mark.usefixtures("machine")
def test_what_files_take_in_a_container_is_free(monkeypatch):
    group = {
        "memory.max": f"{4 << 30}\n",
        "memory.current": f"{4 << 30}\n",
        "memory.stat": f"anon 5\ninactive_file {3 << 30}\n",
    }
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, **how: group.get(path.name) or read(path, **how)
    )
    assert about("memory").found == "3.0 GB of memory are free"
    group["memory.max"] = "max\n"
    assert about("memory").found != "3.0 GB of memory are free"


def test_the_versions_of_what_carries_the_devices_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    versions = {"torch": "2.13.0", **devices._cuda_versions()}
    found = Machine(found=Devices(kind="cuda", versions=versions), **HOST)
    monkeypatch.setattr(doctor, "look_at_machine", lambda: found)
    answer_as_nvidia(monkeypatch, tmp_path, "echo 570.86; echo 570.86")
    assert about("versions").found == "torch 2.13.0, CUDA 13.0, NCCL 2.27.3, NVIDIA driver 570.86"


def test_devices_that_cannot_be_counted_stop(monkeypatch):
    broken = Machine(found=Devices(kind="cpu", error="no driver"), **HOST)
    monkeypatch.setattr(doctor, "look_at_machine", lambda: broken)
    found = about("devices")
    assert (found.level, found.found) == (STOPS, "no driver")
    assert "devices='cpu'" in found.remedy


def answer_as_nvidia(monkeypatch, folder, script):
    """A stand-in for nvidia-smi that answers as it does."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("problem", "visible", "told", "remedy"),
    [
        ("the driver is too old", None, "Torch says: the driver is too old", "driver"),
        ("", "", "CUDA_VISIBLE_DEVICES='' hides H200, H200", "del os.environ"),
        ("", None, "torch 2.13.0+cpu cannot use H200, H200", "built for CUDA"),
    ],
)
def test_gpus_that_torch_does_not_use_are_named(
    problem, visible, told, remedy, monkeypatch, tmp_path
):
    versions = {"torch": "2.13.0+cpu"}
    found = Machine(found=Devices(kind="cpu", versions=versions, problem=problem), **HOST)
    monkeypatch.setattr(doctor, "look_at_machine", lambda: found)
    answer_as_nvidia(monkeypatch, tmp_path, "echo H200; echo H200")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    finding = about("devices")
    assert finding.level == HURTS
    assert told in finding.found
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("server", "of_page", "level", "said"),
    [
        ("/some/bin/jupyter-lab --no-browser", "5.0.16", FINE, "jupyterlab-manager 5.0.16 in the"),
        ("-m notebook", "3.1.4", HURTS, "/bin/python -m pip install 'jupyterlab_widgets==3.*'"),
        ("/bin/jupyterhub-singleuser", None, HURTS, "jupyterlab-manager is not in the Jupyter"),
        ("-m ipykernel_launcher -f c.json", None, FINE, "where a panel stays empty, install"),
    ],
)
def test_widgets_that_the_server_of_this_kernel_lacks_are_named(
    monkeypatch, tmp_path, server, of_page, level, said
):
    """Whatever the kernel's own environment has: the server may have another one."""
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda: [sys.prefix + "/share/jupyter"])
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    # The server has started a process that started this kernel.
    command = [str(python), *server.split()]
    above = [
        SimpleNamespace(cmdline=lambda: ["sh", "-c", "exec python"], environ=dict),
        SimpleNamespace(cmdline=lambda: command, environ=dict),
    ]
    monkeypatch.setattr("psutil.Process.parents", lambda _: above)
    if of_page:
        file = tmp_path / "share/jupyter" / doctor._EXTENSION
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"version": of_page}))
    (found,) = doctor._widgets(Machine(found=Devices(kind="cpu"), **HOST))
    assert found.level == level
    assert said in f"{found.found} {found.remedy}"
    assert bool(found.remedy) == (level != FINE)


def test_a_finding_reads_as_a_line_and_its_remedy_as_another():
    bad = Finding(subject="a<b", found="seen", remedy="do it", stops=True)
    shown = "\n".join(as_lines([Finding(subject="x", found="good"), bad]))
    assert shown == "✓ x: good\n✗ a<b: seen\n    to do: do it"
