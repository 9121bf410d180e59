"""The package as users get it: the wheel, in an environment that knows nothing of this tree.

The environment is new and holds the wheel alone; what the wheel depends on is lent to it from
the one that runs the tests. `make test-wheel` gives one for each Python, with nothing lent.
"""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from jupyter_client.kernelspec import KernelSpecManager
from packaging.requirements import Requirement

from notebook_accel.training.tracking import LOGGER_TYPE_TO_CLASS
from tests import interpreters
from tests.notebook.kernels import Kernel, kernel_manager
from tests.public import DOORS, PACKAGE, public_names

TREE = PACKAGE.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], TREE)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a clean environment that has the wheel."""
    if given := os.environ.get("WHEEL_PYTHON"):
        return Path(given).absolute()
    home = tmp_path_factory.mktemp("clean")
    run([sys.executable, "-m", "venv", "--without-pip", str(home)], home)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--no-deps", "--no-index", "--target", str(site), str(wheel)], home)
    # A plain line lends the packages, and not the .pth files beside them: the tree's own
    # editable install stays out.
    (site / "lent.pth").write_text(sysconfig.get_path("purelib"))
    return home / "bin" / "python"


def _without_path():
    """This environment; whoever runs the tests may have a path to the tree in it."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}


def run(command, folder):
    return interpreters.run(command, _without_path(), folder=folder)


def test_the_wheel_holds_the_package_alone_and_all_of_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        texts = {name: archive.read(name) for name in names}
    inside = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    kinds = {".py", ".pyi", ".css", ".js", ".typed"}
    sources = {p.relative_to(TREE).as_posix() for p in PACKAGE.rglob("*") if p.suffix in kinds}
    assert inside == sources
    assert all(texts[name] == (TREE / name).read_bytes() for name in sources)
    assert {"notebook_accel/py.typed", "notebook_accel/render/panel.css"} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_citation_names_the_version():
    citation = yaml.safe_load((TREE / "CITATION.cff").read_text())
    assert citation["version"] == version("notebook-accel")


# What a Colab kernel runs; installing must not upgrade it, nor an older torch that still works.
COLAB = {
    "ipykernel": "6.17.1",
    "ipython": "7.34.0",
    "ipywidgets": "7.7.1",
    "psutil": "5.9.5",
    "torch": "2.9.1",
}


def test_the_bounds_admit_what_colab_runs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        lines = archive.read(name).decode().splitlines()
    needed = [Requirement(line[15:]) for line in lines if line.startswith("Requires-Dist: ")]
    wanted = {need.name: need.specifier for need in needed if not need.marker}
    assert all(wanted[name].contains(version) for name, version in COLAB.items())


# Doors open as attributes, without an import of their own.
_ATTRIBUTES = """
import importlib, json, sys
import notebook_accel as accelerate
assert "torch" not in sys.modules
for door in ("utils", "logging", "state", "data_loader", "optimizer", "scheduler", "launchers"):
    assert getattr(accelerate, door).__name__ == f"notebook_accel.{door}"
accelerate.utils.set_seed(1)
assert accelerate.__version__[0].isdigit()
assert accelerate.training.__name__ == "notebook_accel.training"
assert not hasattr(accelerate, "no_such_door")
assert not hasattr(accelerate, "_private")
"""


def test_every_name_and_door_imports_from_the_wheel(python, tmp_path):
    trackers = [kind.module for kind in LOGGER_TYPE_TO_CLASS.values()]
    script = f"""
        for name in {list(public_names())}:
            getattr(accelerate, name)
        for door in {DOORS}:
            importlib.import_module(door)
        loaded = [name for name in {trackers} if name in sys.modules]
        print(json.dumps([accelerate.__file__, loaded]))
    """
    printed = run([str(python), "-c", _ATTRIBUTES + dedent(script)], tmp_path)
    file, loaded = json.loads(printed)
    assert Path(file).is_relative_to(python.parent.parent)
    assert loaded == [], "libraries that nobody has asked to track by"


CELL = """
import notebook_accel, torch
from notebook_accel import Accelerator, notebook_launcher

offset = 10
def train():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    accelerator.log({"weight": model.module.weight.item()})
    who = accelerator.process_index + offset
    return who, accelerator.num_processes, notebook_accel.__file__

run = notebook_launcher(train, num_processes=2)
print("RESULT", list(run), "metrics", len(run.metrics))
"""


def test_a_kernel_of_that_environment_launches(python, tmp_path):
    text = execute(python, CELL, tmp_path)
    assert "RESULT" in text, text
    (line,) = [line for line in text.splitlines() if line.startswith("RESULT")]
    home = str(python.parent.parent)
    assert "(10, 2, " in line
    assert "(11, 2, " in line
    assert line.count(home) == 2
    assert line.endswith("metrics 1")


def execute(python, code, folder):
    """What a cell prints in a fresh kernel of the environment."""
    spec = folder / "kernels" / "clean"
    spec.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "clean"}))
    specs = KernelSpecManager(kernel_dirs=[str(spec.parent)])
    with kernel_manager(kernel_name="clean", kernel_spec_manager=specs) as manager:
        manager.start_kernel(cwd=str(folder), env=_without_path())
        client = manager.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            reply = Kernel(manager, client).run(code, timeout=90)
        finally:
            client.stop_channels()
    return "\n".join([reply.text, *reply.traceback])


USER_FILE = """
from notebook_accel import Accelerator, WorkerError, notebook_launcher, set_seed

def train(rate: float) -> float:
    set_seed(0)
    accelerator = Accelerator(mixed_precision="bf16")
    return rate * accelerator.num_processes

try:
    run = notebook_launcher(train, args=(3e-4,), num_processes=2)
    print(run[0], run.metrics, run.logs(rank=0), run.status)
except WorkerError as error:
    print(error.rank, error.traceback)
"""


# Without the cache of `make check` mypy computes for a minute, and as long again for each busy
# process beside it.
@pytest.mark.timeout(300)
def test_a_type_checker_knows_the_names(tmp_path):
    """Right use passes under --strict; a misspelt argument is found.

    Of the tree's files, which the wheel holds as they are, ``py.typed`` among them: what
    `make check` found out of them need not be found again.
    """
    (tmp_path / "right.py").write_text(USER_FILE)
    (tmp_path / "wrong.py").write_text(USER_FILE.replace("num_processes=2", "num_process=2"))
    names = ", ".join(public_names())
    (tmp_path / "names.py").write_text(f"from notebook_accel import {names}\n")
    files = [str(tmp_path / f"{name}.py") for name in ("right", "wrong", "names")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *files],
        cwd=TREE,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(found) == 1, done.stdout + done.stderr
    assert "wrong.py" in found[0]
    assert "num_process" in found[0]
