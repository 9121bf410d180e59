"""``%accelerate doctor``: what hurts a launch on this machine and in its Jupyter server."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil

from notebook_accel.launch.doctor import Finding, as_lines, examine
from notebook_accel.notebook.clicks import find_kernel

# ``python .../jupyter-lab``, ``python -m jupyterlab``, ``python .../jupyterhub-singleuser``.
_SERVER = re.compile(r"^(?:.*/)?(?:jupyter(?:[-_]?\w+|hub-singleuser)?|notebook)$")


def diagnose() -> list[str]:
    """Examine this machine and its Jupyter server, and return what was found as lines."""
    return as_lines([*examine(), *_widgets()])


_EXTENSION = "labextensions/@jupyter-widgets/jupyterlab-manager/package.json"


def _widgets() -> list[Finding]:
    """Return a finding on the server's extension that draws widgets; none outside of a kernel."""
    if find_kernel() is None:
        return []
    found = f"ipywidgets {importlib.metadata.version('ipywidgets')}"
    server = _server_python()
    if server is None:
        found += "; where a panel stays empty, install jupyterlab_widgets where Jupyter itself runs"
        return [Finding(subject="widgets", found=found)]
    # A server looks for extensions in its own environment, then in shared folders.
    paths: Any = importlib.import_module("jupyter_core.paths")  # it comes with ipykernel
    shared = (Path(each) for each in paths.jupyter_path() if not each.startswith(sys.prefix))
    folders = (Path(server).parent.parent / "share/jupyter", *shared)
    version = next(filter(None, map(_version_in, folders)), "")
    # By the first number of their versions: ipywidgets 8 goes with 5, ipywidgets 7 with 3.
    fitting, package = ("3", "1") if found.startswith("ipywidgets 7") else ("5", "3")
    found += f"; jupyterlab-manager {version or 'is not'} in the Jupyter server ({server})"
    if version.partition(".")[0] == fitting:
        return [Finding(subject="widgets", found=found)]
    remedy = f"{server} -m pip install 'jupyterlab_widgets=={package}.*', then reload the page"
    remedy += "; until then, view='text' shows runs as lines"
    return [Finding(subject="widgets", found=found, remedy=remedy)]


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


def _version_in(folder: Path) -> str:
    """Return the version of the widgets' JupyterLab extension in ``folder``; "" if it has none."""
    try:
        return str(json.loads((folder / _EXTENSION).read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError):
        return ""
