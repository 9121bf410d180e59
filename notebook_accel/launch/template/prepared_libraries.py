"""Which modules are a library's: those whose files nobody edits while a notebook is open.

A library's modules may be imported once for all ranks (prepared.py). The notebook's own files and
editable installs are imported in each rank, fresh, so that an edit counts.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Iterable
from importlib.util import find_spec
from typing import Any

_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_OF_PYTHON = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
# What every template imports; what else of them is imported later is not worth a process.
OF_TEMPLATE = {"torch", "numpy", "tqdm", "psutil", "cloudpickle", "msgspec"}
# What only a notebook's kernel uses. notebook_accel's own modules are in each template.
_OF_KERNEL = {
    *("IPython", "comm", "debugpy", "google", "ipykernel", "ipywidgets", "jedi"),
    *("jupyter_client", "jupyter_core", "matplotlib_inline", "notebook_accel"),
    *("prompt_toolkit", "pydev_ipython", "pydevd", "tornado", "traitlets", "zmq"),
}


def file_of(module: Any) -> str:
    """Return the file of a module, or of a module's spec; "" if it has none."""
    spec = getattr(module, "__spec__", module)
    return str(spec.origin) if getattr(spec, "has_location", False) and spec.origin else ""


def is_library_file(path: str) -> bool:
    """Whether a file belongs to an installed package or to Python."""
    return any(folder in path for folder in _FOLDERS) or path.startswith(_OF_PYTHON)


def modules_of(roots: Collection[str], names: Iterable[str]) -> list[str]:
    """Return which of the named modules belong to these packages, and have a file."""
    return [n for n in names if n.partition(".")[0] in roots and file_of(sys.modules.get(n))]


def is_library(root: str) -> bool:
    """Whether a top-level package was installed from outside, not in editable mode.

    Python's own modules are not: to import them takes no time.
    """
    if root in _OF_KERNEL or root.startswith("_") or root in sys.stdlib_module_names:
        return False
    try:
        spec: Any = find_spec(root)
    except (ImportError, ValueError, AttributeError):  # a module made by hand, which has no spec
        return False
    # A namespace package has folders alone.
    folders = getattr(spec, "submodule_search_locations", None) or ()
    places = [file_of(spec)] if file_of(spec) else [*folders]
    return bool(places) and all(any(f in p + os.sep for f in _FOLDERS) for p in places)
