"""What the pages of the site tell a reader to type works, and what they name exists.

Whether the site can be built, and its links lead somewhere, is for ``make docs``.
"""

import ast
import importlib.util
import io
import re
import shlex
from contextlib import redirect_stdout
from functools import cache

import pytest

from notebook_accel.cli import main
from tests.kernel.notebooks import open_notebook
from tests.public import PACKAGE, public_names

DOCS = PACKAGE.parent / "docs"
README = DOCS.parent / "README.md"
PAGES = sorted(DOCS.glob("*.md")) + sorted(DOCS.glob("[!n]*/*.md"))
# A comment above a block may say that it must raise, or why it cannot run here.
BLOCK = re.compile(
    r"(?:^% (raises|not run): ([^\n]+)\n)?^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE
)
# By page: a library that `make test` has not.
NEEDS = {"guide/lightning.md": "lightning"}
KINDS = {"python", "ipython", "sh", "text", "diff"}


def blocks(page, *languages):
    """The blocks of a page: "raises", "not run" or ""; what it raises, or why not; the text."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert {kind for *_, kind, _ in found} <= KINDS, "a kind that no test runs"
    return [(what, why, text) for what, why, kind, text in found if kind in languages]


@cache
def commands():
    """The commands that ``notebook-accel --help`` lists."""
    with redirect_stdout(io.StringIO()) as shown:
        main(["--help"])
    return {*re.findall(r"^  ([\w-]+)  ", shown.getvalue(), flags=re.MULTILINE)}


def name_of(page):
    return page.relative_to(DOCS).as_posix()


def is_run(page):
    return any(what != "not run" for what, *_ in blocks(page, "python"))


def page_to_run(page):
    """The page that a stranger reads first is run each time."""
    first = name_of(page) == "index.md"
    marks = [] if first else [pytest.mark.long]
    needs = NEEDS.get(name_of(page), "torch")
    if importlib.util.find_spec(needs) is None:
        marks.append(pytest.mark.skip(reason=f"needs {needs}: make test-libraries"))
    return pytest.param(page, id=name_of(page), marks=marks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", map(page_to_run, filter(is_run, PAGES)))
def test_the_blocks_of_a_page_run_in_a_new_kernel_one_after_the_other(page, tmp_path):
    with open_notebook() as notebook:
        notebook.run(f"%cd -q {tmp_path}")
        for what, why, text in blocks(page, "python", "ipython"):
            if what == "raises":
                assert why in notebook.fails(text)
            elif what != "not run":
                notebook.run(text)


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_the_commands_of_shell_blocks_exist(page):
    makefile = (DOCS.parent / "Makefile").read_text(encoding="utf-8")
    for _, _, text in blocks(page, "sh"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            while words[:1] == ["srun"] or (words and words[0].startswith("--")):
                words = words[1:]
            if words[:1] == ["make"]:
                assert f"\n{words[1]}: " in makefile
            elif words[:1] == ["notebook-accel"]:
                assert words[1] in commands()
            else:
                assert words[:2] == ["pip", "install"]


def test_the_reference_lists_each_public_name_once():
    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    ours, theirs = text.split("## From Accelerate itself")
    listed = re.findall(r"^   (\w+)$", ours, flags=re.MULTILINE)
    assert sorted(listed) == sorted({*listed})
    from_accelerate = {name for name, module in public_names().items() if ".compat." in module}
    assert {*listed} == public_names().keys() - from_accelerate
    assert {*re.findall(r"`(\w+)`", theirs)} - {"accelerate"} == from_accelerate


def test_the_page_of_commands_shows_all():
    text = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")
    assert {*re.findall(r"^## ([\w-]+)$", text, flags=re.MULTILINE)} == commands()


@cache
def texts_of_the_package():
    """All texts in the code, with … for what is filled in."""
    nodes = [
        node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
    ]
    plain = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    filled = [_with_gaps(node) for node in nodes if isinstance(node, ast.JoinedStr)]
    return plain + filled


def _with_gaps(text):
    return "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in text.values)


def test_errors_are_listed_by_what_the_code_says_in_their_order():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    # Behind the text, in brackets: the library that says it, where it is not this one.
    errors = re.findall(r"^## `(.+?)`( \(\w+\))?$", page, flags=re.MULTILINE)
    titles = [title.lower() for title, _ in errors]
    assert titles == sorted(titles)
    assert len(titles) > 50
    for title, library in errors:
        parts = [part.strip(" ;") for part in title.split("…")]
        assert library or any(says(text, parts) for text in texts_of_the_package()), title


def says(text, parts):
    """Whether the parts stand in the text, one after the other."""
    for part in filter(None, parts):
        _, found, text = text.partition(part)
        if not found:
            return False
    return True
