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
from multiprocessing import util

import pytest
import torch
from ipykernel.kernelbase import Kernel
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

from notebook_accel.private import of_torch
from tests.interpreters import run_script
from tests.public import PACKAGE

ROOM = PACKAGE / "private"
MOST = 45
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


@cache
def _seen_in_a_group():
    """What a process finds that has a process group, alone in it."""
    return set(run_script(_LOOKS_IN_A_GROUP).split())


_LOOKS_IN_A_GROUP = """
import contextlib, time, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from notebook_accel.private import of_torch

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

@contextlib.contextmanager
def told(*names):
    with contextlib.suppress(AttributeError, AssertionError, TypeError, IndexError):
        yield
        print(*names)

model = fully_shard(torch.nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
model.set_requires_gradient_sync(False)
model(torch.ones(1, 2)).sum().backward()
def whole_gradients():
    state = fully_shard.state(model)
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    found = [held for group in groups for held in group.fsdp_params]
    seen = [(held.unsharded_accumulated_grad, held._unsharded_param.grad) for held in found]
    return [grad for pair in seen for grad in pair if grad is not None]

with told("_fsdp_param_group", "_fsdp_param_groups", "_unsharded_param"):
    assert len(whole_gradients()) >= 2
    of_torch.drop_whole_gradients(model, {id(each) for each in model.parameters()})
    assert whole_gradients() == []
with told("_flatten"):
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert of_torch.flatten_mesh(mesh["a", "b"], "both").mesh_dim_names == ("both",)
    assert mesh["both"].size() == 1
with told("_spec"):
    spread = distribute_tensor(torch.ones(2), dist.init_device_mesh("cpu", (1,)))
    part = of_torch.at_other_device(spread, torch.zeros(2))
    assert part.placements == spread.placements and not part.to_local().any()
with told("_dump_fr_trace", "pg_names"):
    dist.all_reduce(torch.ones(3))
    recorded = of_torch.recorded_collectives()
    if not recorded and torch.__version__ < (2, 12):  # gloo's are not there
        print("_dump_fr_trace", "pg_names")
    assert recorded
    for _ in range(500):  # a thread of gloo's notes the end
        newest = of_torch.recorded_collectives()[-1]
        if newest["retired"]:
            break
        time.sleep(0.01)
    assert newest["retired"] and newest["profiling_name"] == "gloo:all_reduce"
    assert newest["input_sizes"] == [[3]] and newest["collective_seq_id"] > 0
    assert of_torch.ranks_of_groups()[newest["process_group"][0]] == [0]
wrapped = DistributedDataParallel(torch.nn.Linear(2, 2))
with wrapped.join(divide_by_initial_world_size=False):
    print(*of_torch.join_flags(wrapped))
"""


def _records_nccl():
    native = torch._C._distributed_c10d
    return not torch.distributed.is_nccl_available() or hasattr(native, "_dump_nccl_trace")


def _tells_of_overflow():
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum() * float("inf")).backward()
    scaler.step(optimizer)
    return bool(of_torch.overflow(scaler, optimizer))


def _knows_compiled():
    model, function = torch.nn.Linear(1, 1), (lambda: 1)
    compiled = torch.compile(model)
    made = torch.compile(function)
    return (
        of_torch.original_module(compiled) is model and of_torch.original_function(made) is function
    )


def _counts_changes():
    tensor = torch.zeros(1)
    before = of_torch.count_of_changes(tensor)
    tensor.add_(1)
    return of_torch.count_of_changes(tensor) == before + 1


def _knows_parts_of_module():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    found = of_torch.parts_of_module(dict(vars(model)))
    weights = of_torch.parts_of_module(dict(vars(model[0])))
    return [*found] == ["0"] and [*weights] == ["weight", "bias"]


def _has_storage():
    typed = torch.storage.TypedStorage(4, dtype=torch.uint8)
    return isinstance(of_torch.untyped_storage(typed), torch.UntypedStorage)


def _calls_at_end_of_backward():
    called = []
    loss = torch.ones(1, requires_grad=True) * 2
    loss.register_hook(lambda _: of_torch.at_end_of_backward(lambda: called.append(1)))
    loss.backward()
    return called == [1]


def _source_has(module, text):
    return text in inspect.getsource(importlib.import_module(module))


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
    return is_older or _source_has("ipykernel.kernelbase", '"_reply_subshell_for"')


def _loads_tensors():
    return "torch._utils._rebuild_tensor_v2" in of_torch.loadable_names()


# What cannot be seen without another library, or several ranks: by a text in the source.
_IN_SOURCES = {
    ("transformers", "_setup_devices"): ("training_args", "def _setup_devices"),
    ("transformers", "_n_gpu"): ("training_args", "self._n_gpu ="),
    ("torchdata", "_num_yielded"): ("stateful_dataloader.stateful_dataloader", "._num_yielded"),
    ("datasets", "_distributed"): ("iterable_dataset", "._distributed"),
    ("deepspeed", "_z3_optimizer"): ("runtime.zero.stage3", "._z3_optimizer ="),
    ("deepspeed", "_hp_mapping"): ("utils.mixed_precision_linkage", "._hp_mapping ="),
    ("deepspeed", "_release_process_group_references"): (
        "utils.groups",
        "def _release_process_group_references(",
    ),
}
_IN_A_GROUP = (
    *("_flatten", "_fsdp_param_group", "_fsdp_param_groups", "_unsharded_param", "_spec"),
    *("_dump_fr_trace", "_join_config", "_divide_by_initial_world_size"),
)
_OF_SCALER = ("self", "optimizer", "inv_scale", "found_inf", "allow_fp16")
_OF_STORE = ("hostname", "port", "rank", "world_size", "timeout", ...)
_RENDEZVOUS = sys.modules["torch.distributed.rendezvous"]
_TAKE = [
    ("torch", torch.amp.GradScaler, "_unscale_grads_", *_OF_SCALER),
    ("torch", distributed_c10d, "_new_process_group_helper", "group_size", "group_rank", ...),
    ("torch", distributed_c10d, "_abort_process_group", "group"),
    ("torch", _RENDEZVOUS, "_create_c10d_store", *_OF_STORE),
    ("python", threading, "_shutdown"),
    ("python", util, "_run_finalizers", "minpriority"),
    ("ipykernel", Kernel, "_publish_status", "self", "status", "channel", "parent"),
]
_OTHERS = {
    "torch": {
        "_C": lambda: callable(torch._C._stash_obj_in_tls),
        "_stash_obj_in_tls": lambda: callable(torch._C._stash_obj_in_tls),
        "_world": lambda: (
            distributed_c10d._world.group_count,
            distributed_c10d._world.pg_backend_config,
        ),
        "_attention": lambda: of_torch.set_rotate_method("allgather") is None,
        "_StorageInfo": lambda: (
            of_torch.part_of_file({"relative_path": "a", "offset": 0, "length": 1}).length == 1
        ),
        "_found_inf_per_device": _tells_of_overflow,
        "_modules": _knows_parts_of_module,
        "_parameters": _knows_parts_of_module,
        "_orig_mod": _knows_compiled,
        "_torchdynamo_orig_callable": _knows_compiled,
        "_dump_nccl_trace": _records_nccl,
        "_version": _counts_changes,
        "_execution_engine": _calls_at_end_of_backward,
        "_iterator": lambda: hasattr(DataLoader([0]), "_iterator"),
        "_untyped_storage": _has_storage,
        "_weights_only_unpickler": _loads_tensors,
        "_get_allowed_globals": _loads_tensors,
    },
    "python": {
        "_clear": lambda: callable(atexit._clear),
        "_run_exitfuncs": lambda: callable(atexit._run_exitfuncs),
        "_exit_function": lambda: callable(util._exit_function),
        "_config": lambda: "semprefix" in multiprocessing.current_process()._config,
    },
    "ipykernel": {
        "_shell_parent": lambda: run_script(_ASKS_FOR_THE_PARENT) == "",
        "_reply_subshell_for": _routes_replies,
    },
}
CHECKS = [
    *(("torch", name, lambda name=name: name in _seen_in_a_group()) for name in _IN_A_GROUP),
    *(
        (library, name, partial(_source_has, f"{library}.{module}", text))
        for (library, name), (module, text) in _IN_SOURCES.items()
    ),
    *(
        (library, name, partial(_takes, owner, name, *rest))
        for library, owner, name, *rest in _TAKE
    ),
    *((library, name, check) for library, of in _OTHERS.items() for name, check in of.items()),
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
    except (AttributeError, AssertionError, ImportError, KeyError, TypeError) as error:
        pytest.fail(f"{library} has no {name} as private/ uses it ({error!r})")
    assert has_it, f"{library} has no {name} as private/ uses it"
