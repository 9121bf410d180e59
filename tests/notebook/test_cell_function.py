from __future__ import annotations

import traceback
from typing import Any

import pytest

from notebook_accel.notebook.cell_function import cell_function, shown
from notebook_accel.notebook.rank_displays import by_rank


def run(text: str, **names: Any) -> tuple[Any, dict[str, Any]]:
    """What the cell shows, and the names after it."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    function = cell_function(text, namespace=namespace, filename="<cell>", name="In[1]")
    return function(), namespace


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2", "3"),
        ("x = 1\nx", "1"),
        ("x = 1", None),
        ("x = 1; x", "1"),
        ("1 + 2;", None),
        ("1 + 2;  # quiet", None),
        ("None", None),
        ("'text'", "'text'"),
        ("for i in range(3):\n    i", None),
        ("from __future__ import annotations\ndef f(a: missing): pass\nf(1)\n5", "5"),
        ("x: int = 3\ny: str\nx", "3"),
        ("if True:\n    z: int = 4\nz", "4"),
        ("", None),
        ("# only a comment", None),
        ("[n for n in range(3)]", "[0, 1, 2]"),
    ],
)
def test_the_value_of_a_last_expression_is_shown(text: str, value: str | None) -> None:
    assert run(text)[0] == value


def test_names_of_the_cell_are_globals_as_in_a_notebook() -> None:
    text = """
import os
def f():
    global made
    made = x
x = 5
class A:
    y = x
f()
made, A.y
"""
    value, names = run(text)
    assert value == "(5, 5)"
    assert {"os", "f", "x", "A", "made"} <= set(names)
    assert names["A"].__module__ == "__main__"
    assert names["A"].__qualname__ == "A"


def test_names_of_the_notebook_are_read_and_replaced() -> None:
    value, names = run("x = x + 1\nf()", x=1, f=lambda: "from the notebook")
    assert value == "'from the notebook'"
    assert names["x"] == 2


def test_only_what_the_cell_mentions_is_provided() -> None:
    def globals_of(text: str) -> set[str]:
        function = cell_function(text, namespace={}, filename="<cell>", name="In[1]")
        return set(function.__code__.co_varnames) | set(function.__code__.co_cellvars)

    assert "rank" in globals_of("rank")
    assert "world_size" in globals_of("def f():\n    return world_size\nf()")
    assert "accelerator" not in globals_of("rank")
    assert "accelerator" not in globals_of("accelerator = make()\naccelerator")


def test_an_error_names_the_line_of_the_page() -> None:
    text = "x = 1\n\nraise ValueError('bad')\n"
    function = cell_function(text, namespace={}, filename="<cell>", name="In[1]", first_line=2)
    with pytest.raises(ValueError, match="bad") as caught:
        function()
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno) == ("<cell>", 4)


@pytest.mark.parametrize("text", ["return 1", "x = = 1", "yield 1", "await f()", "break"])
def test_what_a_cell_cannot_hold_is_a_syntax_error(text: str) -> None:
    with pytest.raises(SyntaxError) as caught:
        cell_function(text, namespace={}, filename="<cell>", name="In[1]", first_line=2)
    assert caught.value.filename == "<cell>"


@pytest.mark.parametrize(
    ("text", "line"),
    [("a = 1\nb = 2\nc = = 3", 4), ("def (", 2), ("a = 1\nreturn a", 3), ("\nif True:\nb", 4)],
)
def test_a_syntax_error_names_the_line_of_the_page(text: str, line: int) -> None:
    with pytest.raises(SyntaxError) as caught:
        cell_function(text, namespace={}, filename="<cell>", name="In[1]", first_line=2)
    assert caught.value.lineno == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("!echo 'hi", 2),
        ("a = 1\n%time f()", 3),
        ("%%time\nf()", 2),
        ("if a:\n    files = !ls", 3),
        ("a.b?", 2),
        ("?a", 2),
    ],
)
def test_lines_of_ipython_are_refused_by_name(text: str, line: int) -> None:
    with pytest.raises(SyntaxError, match=r"shell lines .* not supported") as caught:
        cell_function(text, namespace={}, filename="<cell>", name="In[1]", first_line=2)
    assert caught.value.lineno == line


def test_other_syntax_errors_keep_their_words() -> None:
    with pytest.raises(SyntaxError) as caught:
        cell_function("a = b % = !c", namespace={}, filename="<cell>", name="In[1]")
    assert "shell" not in caught.value.msg


def test_a_long_value_is_cut() -> None:
    text = shown("x" * 1_000_000)
    assert text is not None
    assert len(text) < 30_000


def test_ranks_that_show_the_same_are_told_together() -> None:
    assert by_rank(["3", "4", "3", None]) == "ranks 0 and 2: 3\nrank 1: 4\n"
    assert by_rank(["a\nb", "a\nb"]) == "ranks 0-1:\na\nb\n"
    assert by_rank([None, None]) == ""
