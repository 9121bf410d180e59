from __future__ import annotations

import linecache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.payload import CellSource
from notebook_accel.notebook.tracebacks import cell_sources

if TYPE_CHECKING:
    import pytest


def cache(monkeypatch: pytest.MonkeyPatch, filename: str, text: str) -> None:
    entry = (len(text), None, text.splitlines(keepends=True), filename)
    monkeypatch.setitem(linecache.cache, filename, entry)


def shell(numbers: dict[str, int]) -> Any:
    """A shell that calls files by their cells, as IPython 8 does."""

    def format_code_name(name: str) -> tuple[str, str] | None:
        return ("Cell", f"In[{numbers[name]}]") if name in numbers else None

    return SimpleNamespace(compile=SimpleNamespace(format_code_name=format_code_name))


def test_every_cell_has_its_text_and_the_name_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    cache(monkeypatch, "/tmp/a.py", "x = 1\n")
    cache(monkeypatch, "/tmp/b.py", "y = 2\n")
    assert cell_sources(shell({"/tmp/a.py": 1, "/tmp/b.py": 7})) == [
        CellSource("/tmp/b.py", "Cell In[7]", "y = 2\n"),
        CellSource("/tmp/a.py", "Cell In[1]", "x = 1\n"),
    ]


def test_of_a_long_session_only_the_newest_cells_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {f"/tmp/{number}.py": number for number in range(30)}
    for filename in numbers:
        cache(monkeypatch, filename, "x" * 100_000 + "\n")
    labels = [source.label for source in cell_sources(shell(numbers))]
    assert labels == [f"Cell In[{number}]" for number in range(29, 20, -1)]


def test_old_shells_name_cells_by_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    cache(monkeypatch, "<ipython-input-1>", "def f():\n    pass\n")
    old = SimpleNamespace(
        compile=SimpleNamespace(), user_ns={"In": ["", "x", "def f():\n    pass"]}
    )
    assert [source.label for source in cell_sources(old)] == ["Cell In[2]"]


def test_outside_of_ipython_there_are_no_cells() -> None:
    assert cell_sources(None) == []
