"""Patches a third-party module in this process: now if it is imported, else right after its import.

Importing a module only to patch it would cost each rank seconds, though most functions never use
the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


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
