"""The examples run, train, and are stored as they ran."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import nbformat
import pytest
from packaging.requirements import Requirement

from notebooks.execute import execute, export, last_text
from tests.public import PACKAGE

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = sorted((PACKAGE.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.timeout(240)
def test_the_quickstart_trains_and_its_page_shows_the_run(tmp_path: Path) -> None:
    notebook = execute(PACKAGE.parent / "notebooks" / "01_quickstart.ipynb")
    found = re.search(r"saw: ([\d.]+)%", last_text(notebook))
    assert found, last_text(notebook)
    assert float(found[1]) > 95
    _, page = export(notebook, tmp_path, "quickstart")
    text = page.read_text()
    assert "process 1 gets" in text
    assert "<svg" in text or "data:image/svg" in text, "the page has no plot of the metrics"
    assert not re.search(r'(src|href)="https?://', text), "the page loads from elsewhere"


# What the last cell says, and what has to hold of it.
RESULTS = {
    "02_text_classification": (r"accuracy ([\d.]+)", lambda found: float(found) > 0.7),
    "03_strategies": (r"never more than (\S+) apart", lambda found: float(found) < 1e-3),
    "04_checkpoints": (r"losses equal: (\w+)", lambda found: found == "True"),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", RESULTS)
def test_an_example_reaches_what_it_promises(name: str) -> None:
    pattern, holds = RESULTS[name]
    text = last_text(execute(PACKAGE.parent / "notebooks" / f"{name}.ipynb"))
    found = re.search(pattern, text)
    assert found, text
    assert holds(found[1]), text


@pytest.mark.timeout(120)
def test_the_cells_of_a_session_go_on_where_those_before_stopped() -> None:
    notebook = execute(PACKAGE.parent / "notebooks" / "05_sessions.ipynb")
    assert last_text(notebook) == "the session has ended\n"
    shown = str([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    assert "12 steps, from " in shown
    assert "('Linear', tensor(True))" in shown


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_stored_as_it_ran(path: Path) -> None:
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert [o for cell in cells for o in cell.outputs if o.output_type == "error"] == []
    assert cells[-1].outputs


def test_binder_has_what_the_examples_import() -> None:
    cells = [cell for path in EXAMPLES for cell in nbformat.read(path, as_version=4).cells]
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    # What stands further in is for those who ask for it, and have a network.
    modules = {*re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)} - {"notebook_accel"}
    needs = [Requirement(text) for text in metadata.requires("notebook-accel") or ()]
    core = [need.name for need in needs if need.marker is None]
    given = {*core, *(PACKAGE.parent / "binder" / "requirements.txt").read_text().split()}
    brings = metadata.packages_distributions()
    missing = [
        name
        for name in sorted(modules - sys.stdlib_module_names)
        if not given.intersection(brings.get(name, ()))
    ]
    assert missing == []
