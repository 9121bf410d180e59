"""Modules are found by other processes, and changed right after their import."""

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location

from notebook_accel.system.modules import change_module, import_path, own_modules


def test_a_module_that_was_only_looked_for_is_changed_once_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "looked_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)

    def change(module):
        module.value += 1

    change_module("looked_for", change)
    assert find_spec("looked_for") is not None
    assert "looked_for" not in sys.modules
    module = importlib.import_module("looked_for")
    monkeypatch.delitem(sys.modules, "looked_for")
    assert module.value == 2
    assert sys.meta_path == finders


def test_a_folder_that_was_left_is_the_notebooks_own_also_below_the_environment(
    tmp_path, monkeypatch
):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "left_behind.py").write_text("")
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))  # as /usr has /usr/src/app
    package = types.ModuleType("package")
    package.__spec__ = ModuleSpec("package", None)
    package.__spec__.submodule_search_locations = [tmp_path / "elsewhere" / "package"]
    monkeypatch.setitem(sys.modules, "package", package)
    with monkeypatch.context() as on_the_path:
        on_the_path.syspath_prepend(tmp_path / "app")
        importlib.import_module("left_behind")
    assert str(tmp_path / "app") in import_path()
    assert str(tmp_path / "elsewhere") in import_path()
    assert not [folder for folder in import_path()[len(sys.path) :] if "site-packages" in folder]


def test_libraries_outside_of_the_environment_are_not_the_persons(monkeypatch):
    """As ``pip install --user`` has them: a search of all they hold took seconds a launch."""
    for name, folder in {"mine": "/home/me", "theirs": "/home/me/.local/lib/site-packages"}.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        spec = spec_from_file_location(name, f"{folder}/{name}.py")
        monkeypatch.setattr(sys.modules[name], "__spec__", spec)
    assert own_modules(["mine", "theirs", "sys"]) == {"mine": sys.modules["mine"]}
