"""What users import: the names of the stub and the doors in ``compat/``, and nothing else."""

import ast
import importlib
from importlib.metadata import version

import accelerate
import pytest
from packaging.version import Version

import notebook_accel
from tests.public import DOORS, PACKAGE, public_names

NAMES = public_names()
# What a door gives of Accelerate's, under the name that Accelerate's users import.
THEIRS = {name for name, module in NAMES.items() if ".compat." in module}


def test_the_package_offers_exactly_the_listed_names():
    assert sorted(vars(notebook_accel)["__all__"]) == sorted(NAMES)
    assert set(NAMES) <= set(dir(notebook_accel))


@pytest.mark.parametrize("name", sorted(NAMES.keys() - THEIRS))
def test_a_public_name_is_what_its_module_exports(name):
    module = importlib.import_module(NAMES[name])
    assert getattr(notebook_accel, name) is getattr(module, name)


def test_a_name_of_accelerates_is_what_it_is_there():
    for name in THEIRS:
        assert getattr(notebook_accel, name) is getattr(accelerate, name)


def test_the_stub_is_plain_reexports_of_one_name_each():
    statements = ast.parse((PACKAGE / "__init__.pyi").read_text()).body
    imports = [one for one in statements if isinstance(one, ast.ImportFrom)]
    others = [ast.unparse(one) for one in statements if not isinstance(one, ast.ImportFrom)]
    assert others == ["__version__: str"]
    names = [(alias.name, alias.asname) for one in imports for alias in one.names]
    assert all(one.level and len(one.names) == 1 for one in imports)
    assert [name for name, alias in names if name != alias] == []
    assert len(names) == len(NAMES), "a name is listed twice"


def test_a_door_has_our_names_and_asks_accelerate_for_the_rest():
    from notebook_accel.hooks import __all__ as names

    opened = {}
    exec("from notebook_accel.utils import *", opened)
    assert {*names} < {*opened}
    assert set(names) <= set(dir(notebook_accel.utils)) & set(dir(notebook_accel.utils.random))
    assert all(getattr(notebook_accel.hooks, name) is opened[name] for name in names)
    paths = [door.removeprefix("notebook_accel.") for door in DOORS]
    theirs = {name for path in paths for name in dir(importlib.import_module(f"accelerate.{path}"))}
    assert {*names} <= theirs


def test_the_version_is_the_installed_one():
    own = Version(notebook_accel.__version__)
    assert own.local == f"notebook.accel.{version('notebook-accel')}"
    assert own.public == version("accelerate"), "the release whose interface the package has"
    assert own >= Version("0.16.0")


def test_help_on_a_run_shows_what_the_documentation_names_alone():
    documented = """
        results wait status stop kill set save pause go_on add_done_callback clone logs
        log_dir progress metrics to_pandas plot stacks show export rescued pids
        world_size state
    """
    members = {name for name in dir(notebook_accel.Run) if not name.startswith("_")}
    assert members == {*documented.split()}
