"""A module is changed right after its import, whoever asked for it before."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accel.system.after_import import change_module

if TYPE_CHECKING:
    import pytest


def test_a_module_that_was_only_looked_for_is_changed_once_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looked_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)

    def change(module: Any) -> None:
        module.value += 1

    change_module("looked_for", change)
    assert find_spec("looked_for") is not None
    assert "looked_for" not in sys.modules
    module: Any = importlib.import_module("looked_for")
    monkeypatch.delitem(sys.modules, "looked_for")
    assert module.value == 2
    assert sys.meta_path == finders
