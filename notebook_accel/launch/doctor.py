"""Checks of this machine for ``%accelerate doctor``: what prevents launches or may hurt a training.

    examine() --one check after the other--> findings, each with its remedy --> as_lines

A check is a function that takes the :class:`Machine` and yields findings. :data:`_QUESTIONS` lists
all checks, in the order in which their findings are shown. No check uses an accelerator in this
process, since that would take memory of the device. Instead, a child of the template (the clean
process from which ranks start) asks torch about the accelerators (template/process.py).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from notebook_accel import tpu
from notebook_accel.config import resolve
from notebook_accel.errors import ConfigError, LaunchError, NotebookAccelError
from notebook_accel.launch import preflight
from notebook_accel.launch.control.run_folder import run_folders, runs_folder
from notebook_accel.launch.preflight import Machine, look_at_machine
from notebook_accel.launch.template.handle import imports_line
from notebook_accel.system.limits import files_needed, free_in_container, hard_limit

FINE, HURTS, STOPS = "fine", "hurts", "stops"
SIGNS = {FINE: "✓", HURTS: "!", STOPS: "✗"}

_GIB = 1024**3
# Docker gives 64 MB. A loader's worker puts each batch there: some batches of images need more.
_SMALL_SHARED_MEMORY = _GIB // 4
# One rank with torch takes about 0.25 GB before it has a model.
_LITTLE_MEMORY = _GIB
# The next run's logs need room beside the old runs, of which 2 GB are kept.
_LITTLE_DISK = _GIB
# nvidia-smi takes a second or two, and never answers where a driver hangs.
_NVIDIA_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of a check of this machine.

    Attributes:
        remedy: what the user should do; "" if all is well, or if ``found`` says it already.
    """

    subject: str
    found: str
    remedy: str = ""
    stops: bool = False

    @property
    def level(self) -> str:
        """How serious the finding is: :data:`FINE`, :data:`HURTS` or :data:`STOPS`.

        :data:`HURTS` means that a training may fail or be slow, :data:`STOPS` that no launch
        succeeds.
        """
        return STOPS if self.stops else HURTS if self.remedy else FINE


def examine(*, in_notebook: bool = False) -> list[Finding]:
    """Run all checks of this machine, and of a notebook's Jupyter server; return their findings.

    It takes a few seconds if this process has launched nothing yet, since the template process, by
    which accelerators are counted, has to start first.
    """
    machine = look_at_machine()
    questions = (*_QUESTIONS, *(_widgets,) * in_notebook)
    return [finding for question in questions for finding in question(machine)]


def as_lines(findings: Iterable[Finding]) -> list[str]:
    """Return one string for each finding: a sign (✓, ! or ✗), the subject and what was found."""
    return [
        f"{SIGNS[each.level]} {each.subject}: {each.found}"
        + (f"\n    to do: {each.remedy}" if each.remedy else "")
        for each in findings
    ]


# ---- the questions -------------------------------------------------------------------------


def _platform(_machine: Machine) -> Iterator[Finding]:
    try:
        preflight.check_platform()
    except NotebookAccelError as error:
        yield Finding(subject="system", found=str(error), stops=True)
    else:
        yield Finding(subject="system", found="processes can be started and watched")


def _devices(machine: Machine) -> Iterator[Finding]:
    devices = machine.found
    if devices.error:
        remedy = "repair the driver, for example, or launch with devices='cpu'"
        yield Finding(subject="devices", found=devices.error, remedy=remedy, stops=True)
    elif devices.names:
        names = ", ".join(f"{index}: {name}" for index, name in enumerate(devices.names))
        yield Finding(subject="devices", found=names)
    else:
        found, remedy = f"no accelerator: ranks train on {machine.num_cores} CPU cores", ""
        names = ", ".join(_ask_nvidia("--query-gpu=name"))
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if devices.problem:
            found = f"{found}. Torch says: {devices.problem}"
            remedy = "repair or update the driver, or install a torch for the one that is there"
        elif names and hidden is not None:
            found = f"{found}; CUDA_VISIBLE_DEVICES={hidden!r} hides {names}"
            remedy = 'del os.environ["CUDA_VISIBLE_DEVICES"], unless that is meant'
        elif names:
            found = f"{found}; torch {devices.versions.get('torch', '')} cannot use {names}"
            remedy = (
                "install a torch that was built for CUDA: https://pytorch.org/get-started/locally/"
            )
        yield Finding(subject="devices", found=found, remedy=remedy)


def _tpus(_machine: Machine) -> Iterator[Finding]:
    platform, count = tpu.count_devices(os.environ)
    found = tpu.library()
    if platform == "TPU" and count and found is None:
        found_none = f"devices of {platform}: {count}, and no library for them"
        yield Finding(subject="TPU", found=found_none, remedy=tpu.INSTALL)
    elif found is not None:
        what = f"devices of {platform}: {count}" if count else "none found"
        named = f"{what}; {found.name} {found.version}"
        yield Finding(subject="TPU", found=named, remedy=found.problem)


def _versions(machine: Machine) -> Iterator[Finding]:
    # One line for each GPU; the driver is the same for all.
    drivers = set(_ask_nvidia("--query-gpu=driver_version"))
    named = [f"{name} {version}" for name, version in machine.found.versions.items()]
    named += [f"NVIDIA driver {version}" for version in sorted(drivers)]
    if named:
        yield Finding(subject="versions", found=", ".join(named))


def _ask_nvidia(query: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _memory(machine: Machine) -> Iterator[Finding]:
    free = min(machine.free_memory, free_in_container())
    remedy = "free some of it: a rank takes 0.25 GB before it has a model"
    found = f"{free / _GIB:.1f} GB of memory are free"
    yield Finding(subject="memory", found=found, remedy=remedy if free < _LITTLE_MEMORY else "")


def _libraries(_machine: Machine) -> Iterator[Finding]:
    with contextlib.suppress(LaunchError):  # of which the devices' finding tells
        if found := imports_line():
            yield Finding(subject="libraries", found=found)


def _shared_memory(_machine: Machine) -> Iterator[Finding]:
    try:
        size = shutil.disk_usage("/dev/shm")
    except OSError as error:
        remedy = "mount a tmpfs there: workers of a DataLoader hand batches over in it"
        yield Finding(subject="/dev/shm", found=str(error), remedy=remedy)
        return
    found, remedy = f"{size.free / 1024**2:,.0f} MB of {size.total / 1024**2:,.0f} MB are free", ""
    if size.free < _SMALL_SHARED_MEMORY:
        remedy = (
            "start the container with --shm-size=1g or --ipc=host; until then, a DataLoader with "
            "num_workers=0 needs none of it (launching needs none either)"
        )
    yield Finding(subject="/dev/shm", found=found, remedy=remedy)


def _limits(_machine: Machine) -> Iterator[Finding]:
    files, needed = hard_limit(), files_needed(8)
    number = "without a limit" if files is None else f"{files:,} at most"
    low = files is not None and files < needed
    remedy = f"8 ranks need {needed}: have it raised" if low else ""
    yield Finding(subject="open files", found=f"{number} (ulimit -Hn)", remedy=remedy)


def _folders(_machine: Machine) -> Iterator[Finding]:
    try:
        folder = runs_folder()
        there = next(path for path in (folder, *folder.parents) if path.is_dir())
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK):
            raise PermissionError(f"{there} cannot be written")
        if folder.is_dir():
            run_folders(folder)
    except (NotebookAccelError, OSError, RuntimeError) as error:
        remedy = "set NOTEBOOK_ACCEL_RUNS to a folder that can be written"
        yield Finding(subject="runs folder", found=str(error), remedy=remedy, stops=True)
        return
    found = f"{folder}: {free / _GIB:.1f} GB are free"
    remedy = "free some of it, or set NOTEBOOK_ACCEL_RUNS to a folder of another disk"
    yield Finding(subject="runs folder", found=found, remedy=remedy if free < _LITTLE_DISK else "")


def _settings(_machine: Machine) -> Iterator[Finding]:
    try:
        resolve({})
    except ConfigError as error:
        remedy = "correct it, or take it away: each launch that does not say otherwise reads it"
        yield Finding(subject="settings", found=str(error), remedy=remedy, stops=True)


# ``python .../jupyter-lab``, ``python -m jupyterlab``, ``python .../jupyterhub-singleuser``.
_SERVER = re.compile(r"^(?:.*/)?(?:jupyter(?:[-_]?\w+|hub-singleuser)?|notebook)$")
_EXTENSION = "labextensions/@jupyter-widgets/jupyterlab-manager/package.json"


def _widgets(_machine: Machine) -> Iterator[Finding]:
    """Yield a finding on the extension that draws widgets in the Jupyter server of this kernel."""
    found = f"ipywidgets {importlib.metadata.version('ipywidgets')}"
    server = _server_python()
    if server is None:
        found += "; where a panel stays empty, install jupyterlab_widgets where Jupyter itself runs"
        yield Finding(subject="widgets", found=found)
        return
    # A server looks for extensions in its own environment, then in shared folders.
    paths: Any = importlib.import_module("jupyter_core.paths")  # it comes with ipykernel
    shared = (Path(each) for each in paths.jupyter_path() if not each.startswith(sys.prefix))
    folders = (Path(server).parent.parent / "share/jupyter", *shared)
    version = ""
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = (folder / _EXTENSION).read_text(encoding="utf-8")
            version = version or str(json.loads(text)["version"])
    # By the first number of their versions: ipywidgets 8 goes with 5, ipywidgets 7 with 3.
    fitting, package = ("3", "1") if found.startswith("ipywidgets 7") else ("5", "3")
    found += f"; jupyterlab-manager {version or 'is not'} in the Jupyter server ({server})"
    remedy = f"{server} -m pip install 'jupyterlab_widgets=={package}.*', then reload the page"
    remedy += "; until then, view='text' shows runs as lines"
    is_fine = version.partition(".")[0] == fitting
    yield Finding(subject="widgets", found=found, remedy="" if is_fine else remedy)


def _server_python() -> str | None:
    """Return the Python of this kernel's Jupyter server; None if no parent is one, or is hidden."""
    try:
        for process in psutil.Process().parents():
            command = process.cmdline()
            if any(_SERVER.search(part) for part in command[1:4]):
                # As it was called: a link leads out of a virtual environment.
                return shutil.which(command[0], path=process.environ().get("PATH"))
    except psutil.Error:  # of another user
        return None
    return None


_QUESTIONS: Iterable[Callable[[Machine], Iterable[Finding]]] = (
    _platform,
    _devices,
    _tpus,
    _versions,
    _memory,
    _libraries,
    _shared_memory,
    _limits,
    _folders,
    _settings,
)
