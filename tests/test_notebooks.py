"""The examples run, train, and are stored as they ran."""

import re
import sys
import time
from importlib import metadata

import nbformat
import pytest
from nbclient import NotebookClient
from packaging.requirements import Requirement
from traitlets import Integer, Type

from notebooks.execute import execute, export, last_text
from tests.kernel.notebooks import open_notebook
from tests.notebook.kernels import AsyncManager
from tests.public import PACKAGE

# Those with a number; tpu_colab.ipynb needs torch_xla (tests/xla).
NOTEBOOKS = PACKAGE.parent / "notebooks"
EXAMPLES = sorted(NOTEBOOKS.glob("0*.ipynb"))
COLAB = "https://colab.research.google.com/"


class Client(NotebookClient):
    """Takes no port of another test's process."""

    kernel_manager_class = Type(AsyncManager)


@pytest.fixture(autouse=True)
def _ports_of_its_own(monkeypatch):
    monkeypatch.setattr("notebooks.execute.NotebookClient", Client)


@pytest.mark.timeout(240)
def test_the_quickstart_trains_and_its_page_shows_the_run(tmp_path):
    notebook = execute(NOTEBOOKS / "01_quickstart.ipynb")
    found = re.search(r"saw: ([\d.]+)%", last_text(notebook))
    assert found, last_text(notebook)
    assert float(found[1]) > 95
    _, page = export(notebook, tmp_path, "quickstart")
    text = page.read_text().replace(COLAB, "")
    assert "process 1 gets" in text
    assert "<svg" in text or "data:image/svg" in text, "the page has no plot of the metrics"
    assert not re.search(r'(src|href)="https?://', text), "the page loads from elsewhere"


def _is_better(losses):
    before, after = map(float, losses.split(" before, "))
    return after < before - 0.1


# What the last cell says, and what has to hold of it.
RESULTS = {
    "02_text_classification": (r"accuracy ([\d.]+)", lambda found: float(found) > 0.7),
    "03_strategies": (r"never more than (\S+) apart", lambda found: float(found) < 1e-3),
    "04_checkpoints": (r"losses equal: (\w+)", lambda found: found == "True"),
    "06_dashboard": (r"stuck: (\w+)", lambda found: found == "stopped"),
    "07_lora": (r": (\S+ before, \S+) with", _is_better),
    "08_knobs": (r"by hand: stopped, loss ([\d.]+)", lambda found: float(found) < 0.5),
    "09_sweep": (r"6 trials of the grid: ([\d.]+)", lambda found: float(found) < 1),
}


class Hasty(Client):
    """On a busy machine; unless it is told to, it waits for no message that is late."""

    iopub_timeout = Integer(0)

    def process_message(self, *message):
        time.sleep(0.002)
        return super().process_message(*message)


def has_output(cell):
    """Whether a cell shows something, beside what libraries say on stderr in some environments."""
    return any(output.get("name") != "stderr" for output in cell.get("outputs", []))


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", RESULTS)
def test_an_example_reaches_what_it_promises(name, monkeypatch):
    monkeypatch.setattr("notebooks.execute.NotebookClient", Hasty)
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = execute(path)
    stored = nbformat.read(path, as_version=4)
    assert list(map(has_output, notebook.cells)) == list(map(has_output, stored.cells))
    pattern, holds = RESULTS[name]
    text = last_text(notebook)
    found = re.search(pattern, text)
    assert found, text
    assert holds(found[1]), text


@pytest.mark.timeout(120)
@pytest.mark.long
def test_the_cells_of_a_session_go_on_where_those_before_stopped():
    notebook = execute(NOTEBOOKS / "05_sessions.ipynb")
    assert last_text(notebook) == "the session has ended\n"
    shown = str([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    assert "12 steps, from " in shown
    assert "('Linear', tensor(True))" in shown


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_lesson_says_what_it_teaches_and_what_to_read_next(path):
    first, *_, last = nbformat.read(path, as_version=4).cells
    title, badge, teaches, needs, *_ = first.source.split("\n\n")
    assert title.startswith("# ")
    assert badge.startswith("[![Open in Colab](")
    assert (teaches[:13], needs[:12]) == ("**You learn**", "**You need**")
    links = re.findall(r"\]\((.+?)\)", last.source.split("## What to read next")[1])
    assert links
    assert not [link for link in links if not (NOTEBOOKS / link).exists()]


def _install_cell(path):
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    return str(cells[0].source)


def test_the_cell_that_installs_does_so_where_the_package_is_missing(tmp_path, monkeypatch):
    tree = PACKAGE.parent
    if not (tree / ".git").exists():
        pytest.skip("no clone of the repository, which the cell would clone")
    # Resolved and built, and nothing changed: what the tests run in stays as it is.
    for name in ("DRY_RUN", "NO_DEPS", "NO_INDEX"):
        monkeypatch.setenv(f"PIP_{name}", "1")
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    cell = _install_cell(EXAMPLES[0])
    with open_notebook() as notebook:
        notebook.run(f"%cd {tmp_path}")
        assert notebook.run(cell) == ""
        notebook.run("import importlib.util\nimportlib.util.find_spec = lambda name: None")
        notebook.run(f"input = lambda question: {str(tree)!r}")
        assert "Would install notebook-accel" in notebook.run(cell)
        assert "data" in notebook.run("!ls")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_stored_as_it_ran_and_installs_as_the_others(path):
    assert _install_cell(path) == _install_cell(EXAMPLES[0])
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert [o for cell in cells for o in cell.outputs if o.output_type == "error"] == []
    assert cells[-1].outputs


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="packages_distributions() of Python 3.10 misses some"
)
def test_binder_has_what_the_examples_import():
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
