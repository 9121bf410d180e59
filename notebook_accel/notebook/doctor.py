"""``%accelerate doctor``: what was found on this machine, and in its notebooks, as a table."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from notebook_accel.launch.doctor import FINE, HURTS, STOPS, Finding, examine
from notebook_accel.notebook.clicks import find_kernel
from notebook_accel.notebook.markup import element, join

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Diagnosis", "diagnose"]

_SIGNS = {FINE: "✓", HURTS: "!", STOPS: "✗"}
_COLOURS = {FINE: "#388e3c", HURTS: "#b7791f", STOPS: "#d32f2f"}
_CELL = "text-align:left;vertical-align:top;padding:2px 14px 2px 0"


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
        return "\n".join(
            f"{_SIGNS[each.level]} {each.subject}: {each.found}"
            + (f"\n    to do: {each.remedy}" if each.remedy else "")
            for each in self.findings
        )

    def _repr_html_(self) -> str:
        rows = [
            element(
                "tr",
                element(
                    "td",
                    _SIGNS[each.level],
                    style=f"{_CELL};color:{_COLOURS[each.level]}",
                    aria_label=each.level,
                ),
                element("td", each.subject, style=f"{_CELL};white-space:nowrap"),
                element("td", *_answer(each), style=_CELL),
            )
            for each in self.findings
        ]
        return str(element("table", join(rows), style="font-size:13px"))


def _answer(finding: Finding) -> list[str]:
    if not finding.remedy:
        return [finding.found]
    remedy = element("div", f"→ {finding.remedy}", style=f"color:{_COLOURS[finding.level]}")
    return [finding.found, remedy]


def diagnose() -> Diagnosis:
    """Look at this machine, and at what its notebooks are drawn with."""
    return Diagnosis([*examine(), *_widgets()])


def _widgets() -> list[Finding]:
    """Whether pages can draw widgets, as far as the kernel's own environment tells."""
    if find_kernel() is None:
        return []
    versions = {name: _version(name) for name in ("ipywidgets", "ipykernel", "jupyterlab-widgets")}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    major = (versions["ipywidgets"] or "8").partition(".")[0]
    page = (versions["jupyterlab-widgets"] or "").partition(".")[0]
    if page and {"8": "3", "7": "1"}.get(major) != page:
        remedy = "install a pair that fits: ipywidgets 8 with jupyterlab-widgets 3; until then, "
        remedy += "view='text' shows runs as lines"
        return [Finding(level=HURTS, subject="widgets", found=found, remedy=remedy)]
    if not page:
        found += "; jupyterlab-widgets is not in the kernel's environment, the only one that was "
        found += "looked at: where a panel stays empty, install it where Jupyter itself runs"
    return [Finding(level=FINE, subject="widgets", found=found)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
