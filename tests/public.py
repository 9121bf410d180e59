"""The one list of public names, read from the stub that also feeds the package itself."""

import ast
import pkgutil
import sys
from pathlib import Path

import notebook_accel

PACKAGE = Path(notebook_accel.__file__).parent


def public_names() -> dict[str, str]:
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    return {
        alias.asname or alias.name: f"notebook_accel.{node.module}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _doors() -> list[str]:
    """Modules of ``compat/``, by the path under which user code imports them."""
    files = [
        info.name for info in pkgutil.walk_packages([str(PACKAGE / "compat")], "notebook_accel.")
    ]
    below = [name for name in sys.modules if name.startswith("notebook_accel.utils.")]
    return sorted({*files, *below} - {"notebook_accel._accelerate"})


DOORS = _doors()
