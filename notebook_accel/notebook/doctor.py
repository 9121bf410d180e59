"""``%accelerate doctor``: what was found on this machine, and in its notebooks, as a table."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from notebook_accel.launch.doctor import FINE, HURTS, SIGNS, STOPS, Finding, as_lines, examine
from notebook_accel.notebook.clicks import find_kernel
from notebook_accel.notebook.markup import element

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Diagnosis", "diagnose"]

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
    """Findings, shown as a table in a notebook and as lines elsewhere.

    Attributes:
        findings: all of them.
    """

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)

    @property
    def can_launch(self) -> bool:
        """Whether nothing was found that stops a launch."""
        return all(finding.level != STOPS for finding in self.findings)

    def __repr__(self) -> str:
        return "\n".join(as_lines(self.findings))

    def _repr_html_(self) -> str:
        width = 14 + 8 * max((len(each.subject) for each in self.findings), default=0)
        rows = [
            element(
                "tr",
                element(
                    "td",
                    SIGNS[each.level],
                    style=f"{_CELL};flex:0 0 24px;color:{_COLOURS[each.level]}",
                    aria_label=each.level,
                ),
                element(
                    "td",
                    element("b", each.subject, style=f"flex:0 0 {width}px;font-weight:600"),
                    element("div", *_answer(each), style="flex:1 1 300px"),
                    style=f"{_CELL};flex:1 1 0;display:flex;flex-wrap:wrap",
                ),
                style=_ROW,
            )
            for each in self.findings
        ]
        body = element("tbody", *rows, style="display:block")
        return str(element("table", body, style="display:block;font-size:13px"))


def _answer(finding: Finding) -> list[str]:
    if not finding.remedy:
        return [finding.found]
    remedy = element("div", f"→ {finding.remedy}", style=f"color:{_COLOURS[finding.level]}")
    return [finding.found, remedy]


def diagnose() -> Diagnosis:
    """Look at this machine, and at what its notebooks are drawn with."""
    return Diagnosis([*examine(), *_widgets()])


# What of each ipywidgets a page needs: the packages and the extension of JupyterLab and Notebook 7
# by the first number of their versions.
_FITTING = {"8": ("3", "5"), "7": ("1", "3")}
_EXTENSION = "labextensions/@jupyter-widgets/jupyterlab-manager/package.json"
# Where every server looks, after the folders of its own environment and of its user.
_OF_MACHINE = (Path("/usr/local/share/jupyter"), Path("/usr/share/jupyter"))
_UNTIL_THEN = "; until then, view='text' shows runs as lines"


def _widgets() -> list[Finding]:
    """Whether pages can draw widgets, as far as this machine tells."""
    if find_kernel() is None:
        return []
    versions = {name: _version(name) for name in ("ipywidgets", "ipykernel", "jupyterlab-widgets")}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    fitting = _FITTING.get((versions["ipywidgets"] or "8").partition(".")[0])
    server = _server_python()
    if server is not None:
        return [_widgets_of_server(server, found, fitting)]
    page = (versions["jupyterlab-widgets"] or "").partition(".")[0]
    if page and fitting and page != fitting[0]:
        remedy = f"install a pair that fits: ipywidgets 8 with jupyterlab-widgets 3{_UNTIL_THEN}"
        return [Finding(level=HURTS, subject="widgets", found=found, remedy=remedy)]
    if not page:
        found += "; jupyterlab-widgets is not in the kernel's environment, the only one that was "
        found += "looked at: where a panel stays empty, install it where Jupyter itself runs"
    return [Finding(level=FINE, subject="widgets", found=found)]


def _widgets_of_server(python: str, found: str, fitting: tuple[str, str] | None) -> Finding:
    """Whether the Jupyter server of that Python has the extension that draws widgets."""
    there = (folder / _EXTENSION for folder in _folders_of_server(python))
    version = next((_version_in(file) for file in there if file.is_file()), None)
    package = "jupyterlab_widgets" if fitting is None else f"jupyterlab_widgets=={fitting[0]}.*"
    install = f"{python} -m pip install '{package}', then reload the page{_UNTIL_THEN}"
    if version is None:
        found += f"; the Jupyter server ({python}) has no extension that draws widgets"
        return Finding(level=HURTS, subject="widgets", found=found, remedy=install)
    found += f"; jupyterlab-manager {version} in the Jupyter server"
    if fitting and version.partition(".")[0] != fitting[1]:
        return Finding(level=HURTS, subject="widgets", found=found, remedy=install)
    return Finding(level=FINE, subject="widgets", found=found)


def _folders_of_server(python: str) -> list[Path]:
    """Where the server looks for extensions, as Jupyter's ``jupyter_path`` says."""
    variable = os.environ.get("JUPYTER_PATH", "").split(os.pathsep)
    of_user = os.environ.get("JUPYTER_DATA_DIR") or Path("~/.local/share/jupyter").expanduser()
    own = Path(python).parent.parent / "share/jupyter"
    return [*(Path(folder) for folder in variable if folder), own, Path(of_user), *_OF_MACHINE]


def _server_python() -> str | None:
    """The Python of the Jupyter server that has started this kernel; None where none has."""
    try:
        for process in psutil.Process().parents():
            command = process.cmdline()
            if any(_SERVER.search(part) for part in command[1:4]):
                # As it was called: a link leads out of a virtual environment.
                return shutil.which(command[0], path=process.environ().get("PATH"))
    except psutil.Error:  # of another user
        return None
    return None


def _version_in(package_json: Path) -> str:
    try:
        return str(json.loads(package_json.read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError):
        return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
