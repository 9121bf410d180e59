"""The walls of the house: who may import whom, and that importing does nothing.

Imports are read from the source, those inside functions and under TYPE_CHECKING included.
"""

import ast
import json
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from tests.interpreters import run_script
from tests.public import PACKAGE, public_names

ROOT = "notebook_accel"

# What each layer may import of ours, itself aside. The root package only lists names, and warms
# the kernel that fetches the launcher.
MAY_IMPORT = {
    "": "notebook.warming",
    "__main__": "cli",
    "errors": "",
    "tpu": "errors private",
    "private": "",
    "system": "errors private",
    "wire": "errors",
    "config": "errors",
    "actions": "errors system wire",
    "rank": "errors actions wire",
    "launch": "errors actions config private rank system tpu wire",
    "training": (
        "errors tpu config.checks config.plugins config.setting private rank system.interrupts wire"
    ),
    "render": "errors launch",
    "notebook": "errors actions config launch private rank render system wire",
    "cli": "errors config launch system training wire",
    "compat": "errors config launch training notebook",
}
# One file alone knows device types; the template asks it, in a child process that then ends.
LATER = {("launch.template.process", "training.processes.devices")}
ONLY_IN_NOTEBOOK = {"IPython", "ipywidgets", "ipykernel", "jupyter_client", "comm"}
CARRIERS = ("ray", "torch_xla", "torch_tpu", "deepspeed", "torch.distributed.elastic")
_LAUNCH = f"{ROOT}.launch"
_TRAINING = f"{ROOT}.training"
# The whole of what a user calls, in one class.
_MAY_BE_LONG = {f"{_TRAINING}.accelerator"}
VAGUE = {"utils", "helpers", "common", "misc", "util", "helper"}
FILES = sorted(PACKAGE.rglob("*.py"))
# What doors pass on as a whole is listed in its module.
DOORS_TEXT = "".join(path.read_text() for path in FILES if "compat" in path.parts)


class Import(NamedTuple):
    """One imported module, where in the file it stands, and whether importing the file does it."""

    module: str
    line: int
    at_import: bool


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def layer_of(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@cache
def imports_of(path):
    return [*_walk(tree_of(path), at_import=True)]


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def _walk(node, at_import):
    for child in ast.iter_child_nodes(node):
        for module in _modules(child):
            yield Import(module, child.lineno, at_import)
        is_later = isinstance(child, _FUNCTIONS) or _is_for_types(child)
        yield from _walk(child, at_import and not is_later)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _is_for_types(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _modules(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    # A relative one, which ruff refuses elsewhere, opens a door below another door.
    if not isinstance(node, ast.ImportFrom) or node.level:
        return []
    return [_whole(node.module, alias.name) for alias in node.names]


def _whole(base, name):
    """The module that ``from base import name`` reaches, public names followed to theirs."""
    if f"{base}.{name}" in MODULES:
        return f"{base}.{name}"
    return public_names().get(name, base) if base == ROOT else base


def ours(path):
    return [i for i in imports_of(path) if _within(i.module, [ROOT])]


def _within(module, parents):
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def allowed(importer, imported):
    layer, target = layer_of(importer), imported.module.removeprefix(f"{ROOT}.")
    if imported.module == ROOT or layer_of(imported.module) == layer:
        return True
    name = importer.removeprefix(f"{ROOT}.")
    known = not imported.at_import and (name, target) in LATER
    return known or _within(target, MAY_IMPORT[layer].split())


def test_a_layer_imports_only_downwards():
    upwards = [
        f"{path}:{i.line}: {i.module}"
        for path in FILES
        for i in ours(path)
        if not allowed(module_name(path), i)
    ]
    assert upwards == [], "MAY_IMPORT says what each layer may import"


def test_only_notebook_knows_of_notebooks():
    others = [path for path in FILES if layer_of(module_name(path)) != "notebook"]
    assert [found for found in imported_by(others) if _within(found[1], ONLY_IN_NOTEBOOK)] == []


def test_what_carries_an_engine_is_imported_inside_its_functions():
    early = imported_by(FILES, at_import=True)
    assert [found for found in early if _within(found[1], CARRIERS)] == []


def imported_by(files, at_import=False):
    """Each file, and a module that it imports, when it is imported itself or at all."""
    return [
        (module_name(path), i.module)
        for path in files
        for i in imports_of(path)
        if i.at_import or not at_import
    ]


def test_nothing_imports_a_door():
    inside = [path for path in FILES if layer_of(module_name(path)) != "compat"]
    users = {module_name(p) for p in inside for i in ours(p) if layer_of(i.module) == "compat"}
    assert users == set()


def test_no_module_has_a_vague_name():
    named = {module for module in MODULES if layer_of(module) != "compat"}
    assert {module for module in named if VAGUE & set(module.split("."))} == set()


def test_modules_do_not_import_each_other_in_a_circle():
    """For types neither, nor in functions: such a circle is a wall that is missing."""
    check_order({module_name(path): {i.module for i in ours(path)} - {ROOT} for path in FILES})


def test_folders_of_the_launch_do_not_import_each_other_in_a_circle():
    """Types aside: a view and the state that it draws know each other. Files on top count alone."""
    check_rooms(_LAUNCH, at_import=True)


def test_rooms_of_the_training_do_not_import_each_other_in_a_circle():
    """For types neither: whoever reads a room needs only those below it."""
    check_rooms(_TRAINING, at_import=False)


def check_rooms(layer, at_import):
    """Check that a layer's folders, and its loose files, import each other in no circle."""

    def room_of(module):
        """``data`` of ``notebook_accel.training.data.loaders``; "" for what is elsewhere."""
        return module.split(".")[2] if module.startswith(f"{layer}.") else ""

    graph = {}
    for path in FILES:
        room = room_of(module_name(path))
        targets = {room_of(i.module) for i in ours(path) if i.at_import or not at_import}
        graph.setdefault(room, set()).update(targets - {room, ""})
    check_order(graph)


def check_order(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_training_has_few_loose_files():
    loose = {path.stem for path in (PACKAGE / "training").glob("*.py")} - {"__init__"}
    assert loose <= {"accelerator", "cell_globals", "fsdp_functions", "local_sgd", "state"}


def test_a_module_is_one_idea_and_what_has_no_underscore_is_public():
    for path in FILES:
        text, name = path.read_text(), module_name(path)
        assert text.count("\n") <= 900 or name in _MAY_BE_LONG, f"{name}: a file is one idea"
        is_door = path.name == "__init__.py" or "compat" in path.parts
        may_list = is_door or f"from {name} import *" in DOORS_TEXT
        assert may_list or "\n__all__ = " not in text, f"{name} needs no __all__"


def test_no_two_classes_have_one_name():
    """Nobody who meets the name in a traceback or by search has to ask which of them it is."""
    nodes = [node for path in FILES for node in ast.walk(tree_of(path))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_what_another_module_imports_is_not_private():
    private = [
        f"{path}:{node.lineno}: {alias.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(ROOT)
        for alias in node.names
        if alias.name.startswith("_") and f"{node.module}.{alias.name}" not in MODULES
    ]
    assert private == []


def test_the_dependencies_are_what_is_imported():
    """Third-party modules in the source, against ``dependencies`` in pyproject.toml."""
    declared = _declared()
    imported = {i.module.split(".")[0] for p in FILES for i in imports_of(p)} - {ROOT, ""}
    imported -= set(sys.stdlib_module_names) | {"__main__", "__future__"}
    core = {_MODULE_OF.get(name, name.replace("-", "_")) for name in declared["core"]}
    extra = {_MODULE_OF.get(name, name.replace("-", "_")) for name in declared["extra"]}
    undeclared = imported - core - extra
    assert undeclared == set(), f"declare {undeclared} in pyproject.toml"
    assert core - imported == _UNIMPORTED, "a core dependency that nothing imports"


_MODULE_OF = {
    "ipython": "IPython",
    "nvidia-ml-py": "pynvml",
    "pyyaml": "yaml",
    "torch-xla": "torch_xla",
}
# What shows our widgets and runs our cells, without being imported by us.
_UNIMPORTED = {"ipykernel"}


def _declared():
    # From the file: what is installed says what was declared when it was installed.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pytest needs it there

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    optional = [text for name in extras.keys() - {"dev"} for text in extras[name]]
    asked = {"core": project["dependencies"], "extra": optional}
    return {
        kind: {Requirement(text).name.lower().replace("_", "-") for text in texts}
        for kind, texts in asked.items()
    }


# ---------------------------------------------------------------- importing has no effect

_PROBE = """
import json, os, signal, sys, threading
def seen():
    tasks = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []
    children = []
    for task in tasks:
        with open(f"/proc/self/task/{task}/children") as file:
            children += file.read().split()
    return {
        "threads": len(tasks),
        "children": len(children),
        "files": len(os.listdir("/proc/self/fd")) if tasks else 0,
        "environment": dict(os.environ),
        "signals": {str(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
        "python threads": threading.active_count(),
        "directory": os.getcwd(),
    }
for name in %(before)r:
    __import__(name)
before = seen()
for name in %(modules)r:
    __import__(name)
after = seen()
print(json.dumps({"before": before, "after": after, "modules": sorted(sys.modules)}))
"""


def probe(modules, before=()):
    """What a fresh interpreter looks like before and after it imports ``modules``."""
    script = _PROBE % {"modules": modules, "before": list(before)}
    return json.loads(run_script(script))


def test_importing_the_package_changes_nothing_and_loads_no_torch():
    seen = probe([ROOT])
    assert seen["after"] == seen["before"]
    loaded = {str(name).split(".")[0] for name in seen["modules"]}
    assert loaded & {"torch", "numpy", "IPython", "ipywidgets", "msgspec"} == set()


def test_what_only_some_trainings_use_is_not_loaded_with_the_accelerator():
    """A notebook's first cell imports it: torch's sharding and compiler alone take a second."""
    loaded = set(probe([f"{ROOT}.training.accelerator"])["modules"])
    parts = ("checkpoint", "fsdp", "pipelining", "tensor")
    assert loaded & {"torch._dynamo", *(f"torch.distributed.{part}" for part in parts)} == set()


def test_importing_every_module_starts_nothing():
    modules = sorted(name for name in MODULES if layer_of(name) != "compat")
    heavy = ("torch", "numpy", "IPython", "ipywidgets", "safetensors.torch", "tqdm.auto")
    # Torch itself sets TORCHINDUCTOR_CACHE_DIR when this part of it is imported.
    pipelines = ("torch.distributed.pipelining",)
    seen = probe(modules, before=heavy + pipelines)
    assert seen["after"] == seen["before"]
