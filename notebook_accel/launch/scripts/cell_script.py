"""Write the cells that a ``%%accelerate`` session has run as a script for torchrun.

    In[1]  import torch                    the script imports torch: In[4] uses it
    In[4]  %%accelerate                    each cell that all ranks have run to its end
           model = torch.nn.Linear(2, 1)
    In[5]  %%accelerate --write train.py
           model(torch.ones(2))            the cell itself, last

Before them stand the statements of the notebook's own cells that made the variables which these
cells use, as in what ``run.export`` writes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from notebook_accel.errors import ConfigError
from notebook_accel.launch.scripts.export import lines_for, script_text
from notebook_accel.launch.text import used_names
from notebook_accel.launch.text.used_names import PROVIDED, is_history, names_of, without_watcher

# Magics that run the code beside them.
_RUNNERS = ("prun", "run", "time", "timeit")
_MADE_BY = {
    "rank": "rank = accelerator.process_index",
    "world_size": "world_size = accelerator.num_processes",
    "device": "device = accelerator.device",
}


def script_of_cells(
    cells: Mapping[int, str],
    *,
    namespace: Mapping[str, Any],
    sources: Sequence[str],
    transform: Callable[[str], str],
    world_size: int,
    mixed_precision: str | None,
    file: str,
) -> str:
    """Return the text of a script that does what the cells do, one after the other.

    Args:
        cells: by execution number; the highest is the cell with ``--write``.
        sources: the notebook's own cells, newest first, for functions and classes.
        transform: turns IPython's syntax into Python.

    Raises:
        ConfigError: a cell has code that a script cannot have.
        NotebookAccelError: a function or class that is needed was not defined in a cell.
    """
    texts = {number: _plain(number, cells[number], transform) for number in sorted(cells)}
    last = max(texts)
    texts[last] = _shown_at_the_end(texts[last])
    assigned: set[str] = set()
    provided: set[str] = set()
    needed: set[str] = set()
    for text in texts.values():
        names = names_of(text)
        used = names.used - assigned
        provided |= used & {"display", *PROVIDED}
        needed |= {name for name in used & namespace.keys() if not is_history(name)}
        assigned |= names.assigned
    needed -= {"display", *PROVIDED, *used_names.OF_IPYTHON}
    blocks = [lines_for(needed, sources, namespace), _provided(provided, mixed_precision)]
    blocks += [f"# ---- In[{number}]\n{text.strip()}\n" for number, text in texts.items()]
    body = "\n".join(block for block in blocks if block.strip())
    text = script_text(body, what=f"In[{last}]", world_size=world_size, file=file)
    try:
        compile(text, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = text.splitlines()[(error.lineno or 1) - 1].strip()
        raise ConfigError(
            f"--write {file}: {error.msg}, at `{line}`: a cell can have what a script cannot; put "
            "it into a function, or into a plain cell of the notebook"
        ) from None
    return text


def _provided(needed: Collection[str], mixed_precision: str | None) -> str:
    """Return the lines that define those names of a session that are needed; "" for none."""
    lines = [line for name, line in _MADE_BY.items() if name in needed]
    if lines or "accelerator" in needed:
        given = f"mixed_precision={mixed_precision!r}" if mixed_precision else ""
        head = "from notebook_accel import Accelerator\n"
        lines = [head, f"accelerator = Accelerator({given})", *lines]
    if "display" in needed:
        lines.insert(0, "from IPython.display import display\n")
    return "\n".join([*lines, ""]) if lines else ""


def _plain(number: int, text: str, transform: Callable[[str], str]) -> str:
    """Drop magics and future imports; ConfigError for a magic that runs code or gives a value."""
    text = without_watcher(text)
    code = transform(text)
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return text  # the whole script is compiled, and says what is wrong
    lines = code.split("\n")
    for node in body:
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        magic = ast.unparse(node) if "get_ipython()." in ast.unparse(node) else ""
        if not magic and not is_future:
            continue
        if any(f"run_line_magic('{name}'" in magic for name in _RUNNERS) or "=" in magic[:20]:
            raise ConfigError(
                f"--write: In[{number}] has a line of IPython that a script cannot have: "
                f"`{text.splitlines()[node.lineno - 1].strip()}`; write it in plain Python"
            )
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        lines[first:last] = [""] * (last - first)
        if magic:
            lines[first] = f"# left out: {text.splitlines()[first].strip()}"
    return "\n".join(lines)


def _shown_at_the_end(text: str) -> str:
    """Return a cell's source with its last expression put into ``print(...)``."""
    body = ast.parse(text).body
    last = body[-1] if body else None
    if not isinstance(last, ast.Expr) or last.col_offset or text.rstrip().endswith(";"):
        return text
    if isinstance(last.value, ast.Call) and ast.unparse(last.value.func) in ("print", "display"):
        return text
    before = text.split("\n")[: last.lineno - 1]
    is_tuple = isinstance(last.value, ast.Tuple)  # maybe without brackets
    value = ast.unparse(last.value) if is_tuple else ast.get_source_segment(text, last.value)
    return "\n".join([*before, f"print({value})"])
