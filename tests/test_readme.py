"""What the README tells a reader to type works; each block is taken out of its text."""

import os
import re
from importlib.metadata import metadata

import pytest

from tests.kernel.notebooks import open_notebook
from tests.public import PACKAGE
from tests.test_docs import README as PAGE
from tests.test_docs import blocks

TREE = PACKAGE.parent
README = PAGE.read_text(encoding="utf-8")
# What develops this package, and nobody who uses it needs.
OUR_OWN = {"dev", "docs"}
FIGURES = (TREE / "benchmarks" / "README.md").read_text(encoding="utf-8")


@pytest.mark.timeout(240)
def test_python_blocks_run_in_a_new_kernel_and_the_cell_for_colab_installs_the_clone(
    tmp_path, monkeypatch
):
    ((*_, cell),) = blocks(PAGE, "ipython")
    clone, install = cell.splitlines()
    folder = clone.split()[-1]
    assert clone.startswith("!git clone <")
    (tmp_path / folder).symlink_to(TREE)
    # Resolved and built, and nothing changed: what the tests run in stays as it is.
    for name in ("DRY_RUN", "NO_DEPS", "NO_INDEX"):
        monkeypatch.setenv(f"PIP_{name}", "1")
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    with open_notebook() as notebook:
        for *_, block in blocks(PAGE, "python"):
            notebook.run(block)
        right = notebook.run("print((model(images).argmax(1) == labels).float().mean().item())")
        assert float(right) > 0.8
        notebook.run(f"%cd {os.fspath(tmp_path)}")
        assert "Would install notebook-accel" in notebook.run(install)


def test_each_extra_link_and_benchmark_that_is_named_exists():
    extras = re.findall(r"`([\w-]+)`", README.split("add an extra:")[1].split(". ")[0])
    there = {*metadata("notebook-accel").get_all("Provides-Extra", [])} - OUR_OWN
    index = (TREE / "docs" / "index.md").read_text(encoding="utf-8")
    assert {*extras} == {*re.findall(r"^\| `([\w-]+)` \|", index, flags=re.MULTILINE)} == there
    scripts = re.findall(r"`(\w+\.py)[^`]*` \|$", README + FIGURES, flags=re.MULTILINE)
    files = [*re.findall(r"\]\(([\w./-]+)", README), *(f"benchmarks/{name}" for name in scripts)]
    assert {"CONTRIBUTING.md", "benchmarks/panel.py"} <= {*files}
    assert not [file for file in files if not (TREE / file).exists()]


def test_each_file_that_contributing_names_exists():
    text = (TREE / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w./-]+)`", text) if re.search(r"\.\w+$|/$", name)}
    files = {name for name in named if "/" in name} - {"dist/"}
    assert "actions/ending.py" in files
    assert not [file for file in files if not ((PACKAGE / file).exists() or (TREE / file).exists())]


def test_the_figures_of_the_readme_stand_in_the_full_table():
    figures = README.split("## Figures")[1].split("## ")[0]
    rows = re.findall(r"^\|.*\|$", figures, flags=re.MULTILINE)
    assert len(rows) > 2
    assert {*rows} <= {*FIGURES.splitlines()}


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 145
    assert len(README) <= 10_800
