"""Modules: which are a library's, where other processes find them, what their import changes.

A library's files are those that nobody edits while a notebook is open. Its modules may be imported
once for all ranks (launch/template/process.py). The notebook's own files and editable installs are
imported in each rank, fresh, so that an edit counts.

A third-party module is patched now if it is imported, else right after its import: importing it
only to patch it would cost each rank seconds, though most functions never use it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable
from importlib.machinery import FileFinder, ModuleSpec
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


# ---- whose they are ------------------------------------------------------------------------


def file_of(module: Any) -> str:
    """Return the file of a module; "" if it has none."""
    spec: Any = getattr(module, "__spec__", None)
    return str(spec.origin) if getattr(spec, "has_location", False) and spec.origin else ""


def is_library_file(path: str) -> bool:
    """Whether a file belongs to an installed package or to Python."""
    return any(folder in path for folder in _FOLDERS) or path.startswith(_OF_PYTHON)


def is_library(root: str) -> bool:
    """Whether a top-level package was installed from outside, not in editable mode.

    Python's own modules are not: to import them takes no time.
    """
    if root in _OF_KERNEL or root.startswith("_") or root in sys.stdlib_module_names:
        return False
    try:
        places = _places(find_spec(root))
    except (ImportError, ValueError, AttributeError):  # a module made by hand, which has no spec
        return False
    return bool(places) and all(map(is_library_file, places))


def modules_of(roots: Collection[str], names: Iterable[str]) -> list[str]:
    """Return which of the named modules belong to these packages, and have a file."""
    return [n for n in names if n.partition(".")[0] in roots and file_of(sys.modules.get(n))]


def own_modules(names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named modules that are files of the person's, or in editable mode."""
    files = {name: file_of(sys.modules.get(name)) for name in names}
    return {
        name: sys.modules[name]
        for name, file in files.items()
        if file and not is_library_file(file) and name.partition(".")[0] != "notebook_accel"
    }


def _places(spec: object) -> list[str]:
    """Return the folders of a package, also of one without a file, or the file of a module."""
    if not isinstance(spec, ModuleSpec):
        return []
    folders = spec.submodule_search_locations
    # They are ``Path``s in transformers 5.
    places = [spec.origin or ""] if folders is None else map(os.fspath, folders)
    return [place for place in places if os.path.isabs(place)]


# ---- where they are found ------------------------------------------------------------------


def import_path() -> list[str]:
    """Return folders in which another process finds what this one can import, or has imported.

    These are the strings in ``sys.path`` (import ignores other entries, such as a ``Path``). A
    relative one is the folder that Python found for it, whatever the working directory is now.
    Folders of imported modules follow: of a former working directory, or on the path for a while.
    """
    path = [
        finder.path
        if isinstance(finder := sys.path_importer_cache.get(entry), FileFinder)
        else entry
        for entry in sys.path
        if isinstance(entry, str)
    ]
    roots = [module for name, module in [*sys.modules.items()] if "." not in name]
    places = (place for root in roots for place in _places(getattr(root, "__spec__", None)))
    left = {os.path.dirname(place) for place in places if not is_library_file(place)}
    return list(dict.fromkeys([*path, *sorted(left)]))


# ---- what their import changes -------------------------------------------------------------


def change_module(name: str, change: Callable[[Any], None]) -> None:
    """Call ``change(module)`` now if the named module is imported, else right after its import."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, change))


class _AfterImport:
    """A finder in ``sys.meta_path`` that calls ``change`` right after one module's import."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name = name
        self._change = change
        self._is_asking = False

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute: Callable[[Any], None] = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self._change(module)

            loader.exec_module = exec_module
        return spec
