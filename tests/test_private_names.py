"""Private names of libraries: all in ``private/``, few, and as the installed releases have them."""

import ast
import atexit
import importlib
import importlib.metadata
import inspect
import multiprocessing
import re
import sys
import threading
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing import util
from pathlib import Path

import pytest
import torch
from ipykernel.kernelbase import Kernel
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from tests.interpreters import run_script
from tests.public import PACKAGE

ROOM = PACKAGE / "private"
MOST = 46
_PRIVATE = re.compile(r"_(?!_)\w*[A-Za-z]\w*")
# What is spelled like a private name, and documented by its library or a protocol of many.
DOCUMENTED = {
    "_asdict",  # of named tuples
    "_dom_classes",  # the CSS classes of a widget, in the specification of ipywidgets' models
    "_dynamo",  # torch.compile's module
    "_exit",  # of os
    "_extra_state",  # how the names end of what Module.get_extra_state gives
    "_fields",
    "_make",
    "_no_split_modules",  # of Transformers' models
    "_render_traceback_",  # of IPython
    "_replace",
    "_tp_plan",
}
# What IPython asks any object for, and what we mark objects of others by.
_WITHOUT_OWNER = re.compile(r"_repr_\w+_|_notebook_accel_\w+")


# ---------------------------------------------------------------- where they are


@cache
def _trees():
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def _defined_here():
    """Private names that the package itself gives to something."""
    found = set()
    for path, tree in _trees().items():
        for node in () if path.startswith("private/") else ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "new")
            ):
                found.add(node.attr)
    return found


def _of_others(tree):
    """The names by which a file knows modules, and parts of modules, that are not ours."""
    found = set()
    for node in ast.walk(tree):
        names = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if not module.startswith("notebook_accel"):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
    return found


def _used(tree, ours):
    """Private names of libraries in a file, and the lines; ``ours`` are the package's own."""
    others = _of_others(tree)
    texts = [node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts_of_text = {id(part) for parts in texts for part in parts}
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Attribute):
            base = node.value
            of_library = isinstance(base, ast.Name) and base.id in others
            found = [node.attr] if of_library or node.attr not in ours else []
        elif isinstance(node, ast.ImportFrom) and not node.level:
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found = [] if parts[0] == "notebook_accel" else parts
        elif isinstance(node, ast.Import):
            found = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Constant) and id(node) not in parts_of_text:
            text = str(node.value)
            found = [] if text in ours or text.endswith("_") else [text]
        for name in found:
            known = name in DOCUMENTED or _WITHOUT_OWNER.fullmatch(name)
            if _PRIVATE.fullmatch(name) and not known:
                yield name, node.lineno


def test_private_names_of_libraries_are_in_their_room_alone():
    found = {
        f"{path}:{line}: {name}"
        for path, tree in _trees().items()
        if not path.startswith("private/")
        for name, line in _used(tree, _defined_here())
    }
    assert found == set(), "give it a function in private/, and a check here"


def test_every_name_has_a_check_and_they_are_few():
    used = {
        name
        for path in ROOM.glob("of_*.py")
        for name, _ in _used(ast.parse(path.read_text()), set())
    }
    assert used == {name for _, name, _ in CHECKS}
    assert len(used) <= MOST


def test_no_class_of_ours_replaces_a_private_method_of_a_library():
    replaced = {
        f"{kind.__module__}.{kind.__name__}.{name}"
        for module in _modules_with_classes()
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
        for base in kind.__mro__[1:]
        if not base.__module__.startswith(("notebook_accel", "typing", "traitlets", "enum"))
        for name in vars(kind).keys() & vars(base).keys()
        if _PRIVATE.fullmatch(name) and inspect.isfunction(vars(kind)[name])
    }
    ours = {f"notebook_accel.training.{name}._unscale_grads_" for name in SCALERS}
    assert replaced == ours


# Given theirs by ``of_torch.unscale_by``.
SCALERS = ("precision.SpreadScaler",)


def _modules_with_classes():
    names = [path.removesuffix(".py").replace("/", ".") for path in _trees()]
    kept = [name for name in names if name.startswith(("training.", "launch.", "notebook."))]
    return [
        importlib.import_module(f"notebook_accel.{name.removesuffix('.__init__')}") for name in kept
    ]


# ---------------------------------------------------------------- what they are


def _takes(owner, name, *parameters):
    """Whether a function takes these; "..." are those at the end that do not matter."""
    found, expected = [*inspect.signature(getattr(owner, name)).parameters], [*parameters]
    if expected[-1:] == [...]:
        found[len(expected) - 1 :] = [...]
    return found == expected


def _source_has(library, file, text):
    folder = Path(find_spec(library).origin).parent
    return text in (folder / f"{file}.py").read_text()


def _records_nccl():
    native = torch._C._distributed_c10d
    return not torch.distributed.is_nccl_available() or hasattr(native, "_dump_nccl_trace")


# In a process of its own: a kernel's shell stays in the process that made it.
_ASKS_FOR_THE_PARENT = """
from ipykernel.ipkernel import IPythonKernel
from notebook_accel.private import of_libraries
kernel = IPythonKernel()
of_libraries.parent_variable(kernel).set({"header": {"session": "a"}})
assert kernel.get_parent("shell")["header"]["session"] == "a"
"""


def _routes_replies():
    version = importlib.metadata.version("ipykernel").split(".")[:2]
    is_older = tuple(map(int, version)) < (7, 4)
    return is_older or _source_has("ipykernel", "kernelbase", '"_reply_subshell_for"')


# What only objects have, by a text in the library's source.
_IN_SOURCES = """
torch _attention distributed/tensor/experimental/_attention set_rotate_method
torch _divide_by_initial_world_size nn/parallel/distributed self._divide_by_initial_world_size
torch _found_inf_per_device amp/grad_scaler def _found_inf_per_device(self, optimizer
torch _fsdp_param_group distributed/fsdp/_fully_shard/_fsdp_state self._fsdp_param_group
torch _fsdp_param_groups distributed/fsdp/_fully_shard/_fsdp_state self._fsdp_param_group
torch _get_allowed_globals _weights_only_unpickler def _get_allowed_globals():
torch _iterator utils/data/dataloader self._iterator =
torch _join_config nn/parallel/distributed self._join_config
torch _modules nn/modules/module __setattr__("_modules",
torch _orig_mod _dynamo/eval_frame "_orig_mod"
torch _parameters nn/modules/module __setattr__("_parameters",
torch _spec distributed/tensor/_api ._spec
torch _StorageInfo distributed/checkpoint/filesystem class _StorageInfo:
torch _torchdynamo_orig_callable _dynamo/eval_frame _torchdynamo_orig_callable
torch _unsharded_param distributed/fsdp/_fully_shard/_fsdp_param self._unsharded_param
torch _untyped_storage storage self._untyped_storage =
torch _weights_only_unpickler serialization _weights_only_unpickler
transformers _setup_devices training_args def _setup_devices
transformers _n_gpu training_args self._n_gpu =
torchdata _num_yielded stateful_dataloader/stateful_dataloader ._num_yielded
datasets _distributed iterable_dataset ._distributed
deepspeed _z3_optimizer runtime/zero/stage3 ._z3_optimizer =
deepspeed _hp_mapping utils/mixed_precision_linkage ._hp_mapping =
deepspeed _release_process_group_references utils/groups def _release_process_group_references(
"""
_SOURCES = [line.split(" ", 3) for line in _IN_SOURCES.strip().splitlines()]
_OF_SCALER = ("self", "optimizer", "inv_scale", "found_inf", "allow_fp16")
_OF_STORE = ("hostname", "port", "rank", "world_size", "timeout", ...)
_RENDEZVOUS = sys.modules["torch.distributed.rendezvous"]
_TAKE = [
    ("torch", torch.amp.GradScaler, "_unscale_grads_", *_OF_SCALER),
    ("torch", distributed_c10d, "_new_process_group_helper", "group_size", "group_rank", ...),
    ("torch", distributed_c10d, "_abort_process_group", "group"),
    ("torch", _RENDEZVOUS, "_create_c10d_store", *_OF_STORE),
    ("torch", DeviceMesh, "_flatten", "self", "mesh_dim_name", ...),
    ("python", threading, "_shutdown"),
    ("python", util, "_run_finalizers", "minpriority"),
    ("ipykernel", Kernel, "_publish_status", "self", "status", "channel", "parent"),
]
_ATTRIBUTES = [
    ("torch", torch, "_C"),
    ("torch", torch._C, "_stash_obj_in_tls"),
    ("torch", torch._C._distributed_c10d, "_dump_fr_trace"),
    ("torch", torch.autograd.Variable, "_execution_engine"),
    ("torch", torch.Tensor, "_version"),
    ("torch", distributed_c10d, "_world"),
    ("torch", distributed_c10d.ProcessGroup, "_get_sequence_number_for_group"),
    ("python", atexit, "_clear"),
    ("python", atexit, "_run_exitfuncs"),
    ("python", util, "_exit_function"),
    ("python", multiprocessing.current_process(), "_config"),
]
CHECKS = [
    ("torch", "_dump_nccl_trace", _records_nccl),
    ("ipykernel", "_shell_parent", lambda: run_script(_ASKS_FOR_THE_PARENT) == ""),
    ("ipykernel", "_reply_subshell_for", _routes_replies),
    *((library, name, partial(_source_has, library, *where)) for library, name, *where in _SOURCES),
    *(
        (library, name, partial(_takes, owner, name, *rest))
        for library, owner, name, *rest in _TAKE
    ),
    *((library, name, partial(hasattr, owner, name)) for library, owner, name in _ATTRIBUTES),
]


@pytest.mark.parametrize(
    ("library", "name", "check"), CHECKS, ids=[f"{c[0]}.{c[1]}" for c in CHECKS]
)
def test_the_installed_release_has_it(library, name, check):
    """What is lost without it is said where private/ uses it."""
    if library != "python":
        module = pytest.importorskip(library, reason=f"{library} is not installed")
        library = f"{library} {module.__version__}"
    try:
        has_it = check()
    except (AttributeError, AssertionError, OSError, TypeError) as error:
        pytest.fail(f"{library} has no {name} as private/ uses it ({error!r})")
    assert has_it, f"{library} has no {name} as private/ uses it"
