"""What cells have done to modules, as their texts say."""

from __future__ import annotations

import sys
import types

import pytest

from notebook_accel.notebook import cell_setup


def test_libraries_outside_of_the_environment_are_not_the_persons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ``pip install --user`` has them: a search of all they hold took seconds a launch."""
    for name, folder in {"mine": "/home/me", "theirs": "/home/me/.local/lib/site-packages"}.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setattr(sys.modules[name], "__file__", f"{folder}/{name}.py", raising=False)
    own = cell_setup._own_modules()
    assert "mine" in own
    assert "theirs" not in own
