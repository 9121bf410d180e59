"""Every name of torch_xla that the package uses is there in the pinned one, and not deprecated."""

import ast
import json
import re
from pathlib import Path

import pytest

import notebook_accel
from tests.xla.plain import run

_IMPORTED = re.compile(r"import_module\('(torch_xla[\w.]*)'\)")


def uses(tree):
    """A module of torch_xla, and what is read of it, for each place of a file that does so."""
    modules = {}  # by what it is called in the file
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours = (one for one in node.names if one.name.split(".")[0] == "torch_xla")
            modules |= {one.asname or one.name: one.name for one in ours}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value = ast.unparse(node.value)
            found = _IMPORTED.fullmatch(value)
            if found or value in modules:
                modules[ast.unparse(target)] = found[1] if found else modules[value]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            yield modules[ast.unparse(node.value)], node.attr


LOOK = """
import json, sys
from importlib import import_module

def is_deprecated(value):
    # By either of the two marks that torch_xla 2.9 has for it.
    file = getattr(getattr(value, "__code__", None), "co_filename", "")
    return hasattr(value, "__deprecated__") or file.endswith("experimental/deprecation.py")

def look(module, name):
    value = getattr(import_module(module), name, None)
    return "missing" if value is None else "deprecated" if is_deprecated(value) else "fine"

print(json.dumps([look(*use) for use in json.loads(sys.argv[1])]))
"""


@pytest.mark.timeout(300)
def test_every_name_is_there_and_stays():
    package = Path(notebook_accel.__file__).parent
    found = {use for path in package.rglob("*.py") for use in uses(ast.parse(path.read_text()))}
    xm = "torch_xla.core.xla_model"
    assert {
        ("torch_xla", "sync"),
        ("torch_xla.runtime", "world_size"),
        (xm, "all_reduce"),
        ("torch_xla.debug.metrics", "counter_value"),
        ("torch_xla.distributed.xla_multiprocessing", "spawn"),
    } <= found
    asked = [(xm, "mark_step"), (xm, "get_ordinal"), *sorted(found)]
    told = dict(zip(asked, json.loads(run(LOOK, json.dumps(asked)).stdout), strict=True))
    assert told.pop((xm, "mark_step")) == "deprecated", "as it is known to be"
    assert told.pop((xm, "get_ordinal")) == "missing", "as it is known to be"
    assert told == dict.fromkeys(found, "fine")
