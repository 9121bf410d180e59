"""Counts what a maintainer has to carry: ``make size`` prints it.

Code lines are those with a token that is no comment and no docstring.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

_BLANK = {
    *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.COMMENT),
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SHORT = 5


class Source:
    """One file: its tree, and the numbers of its lines by kind."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self.path, self.tree = path, ast.parse(text)
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in _BLANK:
                lines.update(range(token.start[0], token.end[0] + 1))
        docstrings: set[int] = set()
        imports: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                if isinstance(node.value.value, str):
                    docstrings |= lines_of(node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)) or is_all(node):
                imports |= lines_of(node)
        self.code, self.docstrings, self.imports = lines - docstrings, docstrings, imports


def lines_of(node: ast.AST) -> set[int]:
    assert isinstance(node, (ast.stmt, ast.expr))
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def is_all(node: ast.AST) -> bool:
    names = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(name, ast.Name) and name.id == "__all__" for name in names)


def used_once(sources: list[Source]) -> list[str]:
    """Private functions of a few code lines, undecorated, whose name the package uses once."""
    uses: Counter[str] = Counter()
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
    return [
        f"{source.path}:{node.lineno} {node.name}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, _FUNCTIONS)
        and node.name.startswith("_")
        and not node.name.startswith("__")
        and not node.decorator_list
        and len(lines_of(node) & source.code) <= _SHORT
        and uses[node.name] == 1
    ]


def main(root: Path) -> None:
    sources = [Source(path) for path in sorted((root / "notebook_accel").rglob("*.py"))]
    tests = [Source(path) for path in sorted((root / "tests").rglob("*.py"))]
    code = sum(len(source.code) for source in sources)
    docstrings = sum(len(source.docstrings) for source in sources)
    imports = sum(len(source.imports) for source in sources)
    names = Counter(s.path.name for s in sources if s.path.name != "__init__.py")
    support = [one for one in tests if not one.path.name.startswith("test_")]
    helpers = used_once(sources)
    print(f"code lines, files          {code:,}, {len(sources)}")
    print(f"docstrings, share of code  {docstrings / code:.0%}")
    print(f"private helpers used once  {len(helpers)}")
    print(f"imports and __all__        {imports / code:.1%}")
    print(f"file names used again      {sum(number > 1 for number in names.values())}")
    print(f"tests: lines, support      {count(tests):,}, {count(support):,}")
    if "-v" in sys.argv:
        print(*helpers, sep="\n")


def count(sources: list[Source]) -> int:
    return sum(len(source.code) for source in sources)


if __name__ == "__main__":
    main(Path(__file__).parents[1])
