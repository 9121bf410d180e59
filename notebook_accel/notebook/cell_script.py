"""A cell of a session as a script that torchrun starts, made of the notebook's own text.

    In[1]  import torch                    in the script: In[4] uses torch
    In[2]  torch.set_num_threads(1)        in the script: it changes what In[4] uses
    In[3]  table = open_it()               left out: nothing below uses it
    In[4]  %%accelerate                    all cells that the session has run are there
           model = torch.nn.Linear(2, 1)
    In[5]  %%accelerate --write train.py
           model(torch.ones(2))            the cell itself, last

Which of the notebook's cells are needed is read from their names, from the last cell to the first.
What may change a needed name is there: a cell too many costs time, one too few gives other results
without a word. Not seen are changes under another name (``optimizer.step()`` changes a model, too;
those of a loop's elements are seen), what functions do to names that they are not given, and what
one does whose value is assigned (``losses = fit(model)``; of ``last = rows.pop()`` and its like it
is seen).
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from notebook_accel.errors import ConfigError
from notebook_accel.notebook.cell_function import PROVIDED
from notebook_accel.notebook.used_names import CellNames, is_history, names_of, without_watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from collections.abc import Set as AbstractSet

__all__ = ["LeftOut", "script_of_cell"]

_HEAD = '''"""{label} of a notebook, with the cells that it needs.

Run it with: torchrun --nproc_per_node={world_size} {file}
"""
'''
# Magics that run the statement beside them once, and look on.
_WATCHERS = ("prun", "time")
# What is changed through these counts for every script: variables, folders, the search path.
_OF_THE_PROCESS = frozenset(["os", "sys"])
_MADE_BY = {
    "rank": "rank = accelerator.process_index",
    "world_size": "world_size = accelerator.num_processes",
    "device": "device = accelerator.device",
}


@dataclass(frozen=True)
class _Part:
    """A cell in the script: its number, its text as Python, its names, and whether the session ran
    it."""

    number: int
    text: str
    names: CellNames
    is_of_session: bool


@dataclass(frozen=True)
class LeftOut:
    """A cell of the session that no script can have: its text, and why, as "ran with --ranks"."""

    text: str
    why: str


def script_of_cell(
    text: str,
    *,
    number: int,
    inputs: Sequence[str],
    session_cells: Mapping[int, str],
    left_out: Mapping[int, LeftOut],
    failed: Collection[int],
    namespace: Collection[str],
    transform: Callable[[str], str],
    world_size: int,
    mixed_precision: str | None,
    file: str,
) -> str:
    """The text of a script that does what the cell does, after the cells before it.

    Args:
        text: of the cell, without the line of its magic.
        number: of the cell.
        inputs: the text of each of the notebook's cells, by number.
        session_cells: text of the cells that the session has run, by number.
        left_out: its other cells.
        failed: the numbers of cells that raised: they are there for what they assign, not for what
            they were to change.
        namespace: the notebook's names.
        transform: turns IPython's syntax into Python.
        world_size: the number of processes that the script's first lines propose.
        mixed_precision: of the session.
        file: the name that they call the script.

    Raises:
        ConfigError: a name that the notebook has, or that a cell of the session has assigned which
            is left out, is used and assigned by no cell of the script; or a cell has what no script
            can.
    """
    text = without_watcher(text)
    names = _names(text, transform)
    last = _shown_at_the_end(_plain(text, transform))
    parts = [_Part(number, last, names, is_of_session=True)]
    needed = set(names.used)
    packages = set(map(_root, _imported(text, transform)))
    from_future = _from_future(text, transform)
    first_of_session = min(session_cells, default=number)
    # The session has these from its start, whatever the notebook called so before.
    at_hand: set[str] = set()
    for earlier in range(number - 1, 0, -1):
        if earlier == first_of_session - 1:
            at_hand = needed & set(PROVIDED)
            needed -= at_hand
        is_of_session = earlier in session_cells
        raw = session_cells.get(earlier, inputs[earlier] if earlier < len(inputs) else "")
        raw = without_watcher(raw)
        # IPython keeps these for all cells that come later.
        from_future |= _from_future(raw, transform)
        names, imported = _names(raw, transform), _imported(raw, transform)
        is_wanted = _is_wanted(names, needed, has_failed=earlier in failed)
        # An import of the package later on did not undo that of its part.
        is_wanted |= any(_root(module) in packages for module in imported if "." in module)
        if is_of_session or is_wanted:
            parts.append(_Part(earlier, _plain(raw, transform), names, is_of_session))
            packages |= needed & set(map(_root, imported))
            # An assignment that depends on something leaves the one before it needed.
            needed = (needed - names.certain) | names.used
    parts.reverse()
    lost = {
        other: (_names(without_watcher(cell.text), transform).assigned, cell.why)
        for other, cell in left_out.items()
    }
    parts, also_lost = _without_lost(parts, lost, file)
    needed = _needed_before(parts)
    _refuse_unassigned(parts, needed, {**lost, **also_lost}, namespace, file)
    first = next(index for index, part in enumerate(parts) if part.is_of_session)
    head = _HEAD.format(label=f"Cell In[{number}]", world_size=world_size, file=file)
    blocks = [head]
    if from_future:
        blocks.append(f"from __future__ import {', '.join(sorted(from_future))}\n")
    blocks += [_block(part) for part in parts[:first]]
    blocks += _provided(at_hand | (needed & {"display", *PROVIDED}), mixed_precision)
    blocks += [_block(part) for part in parts[first:]]
    script = "\n".join(blocks)
    try:
        compile(script, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = script.splitlines()[(error.lineno or 1) - 1].strip()
        raise ConfigError(
            f"--write {file}: {error.msg}, at `{line}`: a cell can have what a script cannot; put "
            "it into a function, or into a cell of its own that the others do not need"
        ) from None
    return script


def _is_wanted(names: CellNames, needed: set[str], *, has_failed: bool) -> bool:
    """Whether a script that needs these names needs a cell of the notebook."""
    if names.assigned & needed:
        return True
    has_changed = names.sets_seed or bool(names.changed & (needed | _OF_THE_PROCESS))
    return has_changed and not has_failed


# The names that a cell assigns which is left out, and why it is.
_Lost = tuple[frozenset[str], str]


def _without_lost(
    parts: Sequence[_Part], lost: Mapping[int, _Lost], file: str
) -> tuple[list[_Part], dict[int, _Lost]]:
    """The parts, without cells that read what only cells before them assign that are left out.

    A later cell may assign it: the failed one that was mended and run again.

    Args:
        parts: in their order; the last one is the cell that is written.
        lost: the cells that are left out, by number.
        file: the name that they call the script.

    Returns:
        The parts, with a comment for each cell that is left out here; and these cells.

    Raises:
        ConfigError: such a cell also changes something.
    """
    kept: list[_Part] = []
    left_out: dict[int, _Lost] = {}
    known: set[str] = set()
    for part in parts[:-1]:
        missing = {
            name: other
            for other, (names, _) in {**lost, **left_out}.items()
            for name in part.names.used & names - known
            if other < part.number
        }
        if not missing:
            kept.append(part)
            known |= part.names.assigned
            continue
        name = min(missing)
        why = f"uses `{name}` of In[{missing[name]}]"
        if part.names.changed - missing.keys():
            raise ConfigError(
                f"--write {file}: In[{part.number}] {why}, which is left out; `%accelerate "
                "restart`, and run the session's cells once more"
            )
        left_out[part.number] = (part.names.assigned, why)
        kept.append(_Part(part.number, f"# Left out: it {why}.", CellNames(), part.is_of_session))
    return [*kept, parts[-1]], left_out


def _needed_before(parts: Sequence[_Part]) -> set[str]:
    """The names that the parts use, and do not assign before."""
    needed: set[str] = set()
    for part in reversed(parts):
        needed = (needed - part.names.certain) | part.names.used
    return needed


def _refuse_unassigned(
    parts: Sequence[_Part],
    needed: AbstractSet[str],
    lost: Mapping[int, _Lost],
    namespace: Collection[str],
    file: str,
) -> None:
    """Raise a ConfigError where a needed name is there in the notebook, and not in the script."""
    assigned = frozenset().union(*(part.names.assigned for part in parts))
    unknown = needed - assigned - {"display", *PROVIDED, *vars(builtins)}
    for name in sorted(unknown):
        for other, (names, why) in lost.items():
            if name in names:
                raise ConfigError(
                    f"--write {file}: `{name}` is assigned by In[{other}], which {why} and is "
                    "left out: run that cell once more, on all ranks and to its end, or assign "
                    f"`{name}` in this one"
                )
    missing = sorted(name for name in unknown if name in namespace and not is_history(name))
    if missing:
        raise ConfigError(
            f"--write {file}: no cell of this notebook assigns `{'`, `'.join(missing)}`, which the "
            "script needs; assign it in a cell, or in this one"
        )


def _block(part: _Part) -> str:
    return f"# ---- In[{part.number}]\n{part.text.strip()}\n"


def _provided(needed: Collection[str], mixed_precision: str | None) -> list[str]:
    """What makes the names that a cell of the session finds there."""
    lines = [line for name, line in _MADE_BY.items() if name in needed]
    if lines or "accelerator" in needed:
        given = f"mixed_precision={mixed_precision!r}" if mixed_precision else ""
        head = "from notebook_accel import Accelerator\n"
        lines = [head, f"accelerator = Accelerator({given})", *lines]
    if "display" in needed:
        lines.insert(0, "from IPython.display import display\n")
    return ["\n".join([*lines, ""])] if lines else []


def _names(text: str, transform: Callable[[str], str]) -> CellNames:
    """The names of a cell, without those of its magics."""
    return names_of(_without_magics(transform(text)))


def _imported(text: str, transform: Callable[[str], str]) -> list[str]:
    """The modules that a cell imports under their own names: ``a.b`` of ``import a.b``."""
    imports = [node for node in _nodes(text, transform) if isinstance(node, ast.Import)]
    return [part.name for node in imports for part in node.names if part.asname is None]


def _from_future(text: str, transform: Callable[[str], str]) -> set[str]:
    """What a cell imports from ``__future__``."""
    nodes = _nodes(text, transform)
    return {part.name for node in nodes if _is_future(node) for part in node.names}


def _is_future(node: ast.AST) -> TypeGuard[ast.ImportFrom]:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _nodes(text: str, transform: Callable[[str], str]) -> list[ast.AST]:
    try:
        return [*ast.walk(ast.parse(transform(text)))]
    except SyntaxError:
        return []


def _root(module: str) -> str:
    return module.partition(".")[0]


def _plain(text: str, transform: Callable[[str], str]) -> str:
    """The text as a file of Python may have it: without IPython's lines and future imports."""
    if not _is_python(text):
        plain = _without_magics(transform(text))
        if not _is_python(plain) or "get_ipython()" in plain:
            # The whole script is compiled, and says what is wrong: ``files = !ls``.
            return text
        text = plain
    # Not splitlines(): a form feed ends no line.
    lines = text.split("\n")
    for node in filter(_is_future, ast.parse(text).body):
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        before = lines[first].encode()[: node.col_offset].decode()
        # Another statement may stand in the same line.
        after = lines[last - 1].encode()[node.end_col_offset :].decode().lstrip("; \t")
        lines[first:last] = [before + after, *[""] * (last - first - 1)]
    return "\n".join(lines)


def _without_magics(text: str) -> str:
    """The text without the calls that IPython made of its own syntax, each a line of its own.

    Of ``%time f()`` stays what it times.
    """
    if not _is_python(text):
        return text
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Expr) or (magic := _magic(node.value)) is None:
            continue
        name, rest = magic
        is_kept = name in _WATCHERS and "\n" not in rest and _is_python(rest)
        line = rest if is_kept else f"pass  # left out: {_typed(name, rest)}"
        count = (node.end_lineno or node.lineno) - node.lineno
        blank = [""] * count
        lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line, *blank]
    return "\n".join(lines)


def _magic(call: ast.expr) -> tuple[str, str] | None:
    """The magic that IPython made a call of, and the text after it; None for any other call."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    texts = [str(part.value) for part in call.args if isinstance(part, ast.Constant)]
    if ast.unparse(call.func.value) != "get_ipython()" or len(texts) != len(call.args):
        return None
    name = call.func.attr
    if name in ("system", "getoutput"):
        return "!", texts[0]
    if name == "run_line_magic":
        return texts[0], texts[1]
    return (f"%{texts[0]}", texts[1]) if name == "run_cell_magic" else None


def _typed(name: str, rest: str) -> str:
    """A magic in one line, about as it was typed."""
    if name in ("pinfo", "pinfo2"):
        return f"{rest}?"
    text = f"!{rest}" if name == "!" else f"%{name} {rest}"
    return " ".join(text.split())


def _is_python(text: str) -> bool:
    """Whether the text is of Python alone, and says something."""
    try:
        return bool(ast.parse(text).body)
    except SyntaxError:
        return False


def _shown_at_the_end(text: str) -> str:
    """The text, where the value of a last expression is printed, as the cell shows it."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return text
    if not body or not isinstance(body[-1], ast.Expr) or text.rstrip().endswith(";"):
        return text
    last = body[-1].value
    is_print = isinstance(last, ast.Call) and ast.unparse(last.func) in ("print", "display")
    source = ast.get_source_segment(text, last)
    if is_print or source is None:
        return text
    lines = text.split("\n")[: body[-1].lineno]
    # What stands before it in its own line: ``x = 2; x * 3``.
    before = lines.pop().encode()[: body[-1].col_offset].decode().rstrip("; \t")
    lines += [before] if before else []
    # Its brackets may stand outside of the expression: ``(a, b)`` over lines.
    if isinstance(last, ast.Tuple):
        source = ast.get_source_segment(text, body[-1]) or source
        source = source if source.startswith("(") else f"({source})"
    return "\n".join([*lines, f"print({source})"])
