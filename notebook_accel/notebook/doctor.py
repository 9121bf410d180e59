"""``%accelerate doctor``: find what stops or hurts a launch on this machine; show it as a table."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from notebook_accel.launch.doctor import FINE, HURTS, SIGNS, STOPS, Finding, as_lines, examine
from notebook_accel.notebook.clicks import find_kernel
from notebook_accel.render.markup import element

_COLOURS = {FINE: "#388e3c", HURTS: "#b7791f", STOPS: "#d32f2f"}
# ``python .../jupyter-lab``, ``python -m jupyterlab``, ``python .../jupyterhub-singleuser``.
_SERVER = re.compile(r"^(?:.*/)?(?:jupyter(?:[-_]?\w+|hub-singleuser)?|notebook)$")
# No inline style knows a narrow page from a wide one, so the text of a row is two flexible boxes:
# where a page is narrow, the answer has lines of its own below what it is about.
_ROW = "display:flex;padding:0;background:none"
_CELL = (
    "box-sizing:border-box;text-align:left;padding:3px 0;font-size:13px;white-space:normal;"
    "overflow-wrap:anywhere;border:none"
)


class Diagnosis:
    """The findings of ``%accelerate doctor``: a table in a notebook, lines in a terminal."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = findings

    def __repr__(self) -> str:
        return "\n".join(as_lines(self.findings))

    def _repr_html_(self) -> str:
        width = 14 + 8 * max((len(each.subject) for each in self.findings), default=0)
        rows = []
        for each in self.findings:
            colour = f"color:{_COLOURS[each.level]}"
            style = f"{_CELL};flex:0 0 24px;{colour}"
            sign = element("td", SIGNS[each.level], style=style, aria_label=each.level)
            subject = element("b", each.subject, style=f"flex:0 0 {width}px;font-weight:600")
            remedy = element("div", f"→ {each.remedy}", style=colour) if each.remedy else ""
            found = element("div", each.found, remedy, style="flex:1 1 300px")
            style = f"{_CELL};flex:1 1 0;display:flex;flex-wrap:wrap"
            rows.append(element("tr", sign, element("td", subject, found, style=style), style=_ROW))
        body = element("tbody", *rows, style="display:block")
        return str(element("table", body, style="display:block;font-size:13px"))


def diagnose() -> Diagnosis:
    """Examine this machine and its Jupyter server, and return what was found."""
    return Diagnosis([*examine(), *_widgets()])


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
