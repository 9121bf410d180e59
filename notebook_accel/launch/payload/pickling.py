"""Picklers for values on their way between the notebook and its ranks.

They extend cloudpickle, which pickles definitions of the notebook by value, in three ways. The
memory of tensors is kept outside of the pickle, without a copy if it is on the CPU. Definitions
that came from the notebook return to it as references to its own objects. Objects that would be
useless in another process, such as a process group, are refused with advice.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import mmap
import os
import pickle
import sys
import types
import typing
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib import import_module
from operator import attrgetter, getitem
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import cloudpickle

from notebook_accel.launch.payload import cells
from notebook_accel.launch.text.used_names import global_names
from notebook_accel.private import of_libraries, of_torch

# ---- what Python pickles only by its name in a module, or not at all -----------------------


def rebuild_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Apply ``lru_cache`` to a function again, with an empty cache (used by unpickling)."""
    return functools.lru_cache(**parameters)(function)


# Objects that have a name of their own, as classes and functions have.
_NAMED: dict[Any, Callable[[Any], tuple[Any, ...]]] = {
    type(functools.lru_cache(len)): lambda value: (
        rebuild_cached,
        (value.__wrapped__, value.cache_parameters()),
        vars(value),
    ),
    typing.NewType: lambda value: (
        type(value),
        (value.__name__, value.__supertype__),
        {"__module__": value.__module__},
    ),
    typing.ParamSpec: lambda value: (typing.ParamSpec, (value.__name__,)),
}

NAMED_TYPES = (*_NAMED, type, types.FunctionType, typing.TypeVar)


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    # cloudpickle 3.1.3 has "<dynamic-code>" for every file, and no traceback would name a cell.
    kind, fields = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return kind, tuple(code.co_filename if field == "<dynamic-code>" else field for field in fields)


# How values are pickled, by their type; picklers add this to their ``dispatch_table``.
BY_TYPE: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    types.CodeType: _reduce_code,
    # Up to Python 3.11 it holds a lock, which cannot be pickled.
    functools.cached_property: lambda value: (
        functools.cached_property,
        (value.func,),
        {"attrname": value.attrname},
    ),
    # That of ``functools.singledispatch``.
    weakref.WeakKeyDictionary: lambda value: (type(value), (dict(value.items()),)),
}


def remake(value: Any) -> tuple[Any, ...] | None:
    """Return the reduce tuple of an object that cloudpickle would pickle wrongly or not at all.

    These are functions under ``lru_cache``, NewTypes and ParamSpecs that other processes cannot
    import, and functions under ``torch.compile``. For any other object return None: cloudpickle
    pickles it.
    """
    reduce = _NAMED.get(type(value))
    if reduce is not None:
        return None if at_its_name(value) is value else reduce(value)
    if isinstance(value, types.FunctionType) and of_torch.original_function(value) is not None:
        closure = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        # It holds torch's context, which compiles the function again.
        if "self" in closure:
            return closure["self"].cell_contents, (of_torch.original_function(value),)
    return None


def at_its_name(value: Any) -> Any:
    """Return what other processes import by the module and qualified name of ``value``, or None."""
    module = sys.modules.get(value.__module__)
    if module is None or module.__name__ == "__main__":
        return None
    try:
        return attrgetter(getattr(value, "__qualname__", None) or value.__name__)(module)
    except AttributeError:
        return None


# From this size on, a result that is a part of a storage is copied out of it.
_LARGE_BYTES = 1 << 20
# A class may say what is sent back to the notebook in the place of its instances.
_UNWRAP = "__notebook_accel_unwrap__"
# The attribute by which a class of ours (or of anybody's) says what to do instead.
STAYS_HOME = "_notebook_accel_stays_home"

_NOTHING: Mapping[int, Any] = MappingProxyType({})
# Parts of these names are no library's, or are of the notebook's process alone.
_NOT_IMPORTED = ("__main__", "__mp_main__", "builtins", "IPython", "ipykernel")

# Modules and names of libraries' objects by ``id``, within :func:`importing`.
_importable: ContextVar[dict[int, tuple[str, str]]] = ContextVar("notebook_accel_importable")
_objects: ContextVar[Mapping[int, Any]] = ContextVar("notebook_accel_objects")


# ---- what pickles name ---------------------------------------------------------------------


def itself(value: Any) -> Any:
    """Return ``value`` (used by unpickling).

    An object whose reduce tuple is ``(itself, (other,))`` is replaced by ``other`` in the pickle.
    """
    return value


def notebook_object(number: int) -> Any:
    """Return the notebook's object of this number from the ``objects`` given to :func:`load`."""
    return _objects.get()[number]


def rebuild_storage(buffer: Any) -> Any:
    """Make a torch storage on the memory of ``buffer``; a read-only buffer is copied first."""
    import torch

    view = memoryview(buffer)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def rebuild_typed_storage(storage: Any, dtype: Any) -> Any:
    """Make a ``TypedStorage``, which each pickled tensor contains, around an untyped storage."""
    from torch.storage import TypedStorage

    make: Any = TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


def rebuild_script(buffer: Any) -> Any:
    """Make a TorchScript module or function, on the CPU, from what ``torch.jit.save`` wrote."""
    import torch

    script: Any = torch.jit.load(io.BytesIO(buffer), map_location="cpu")  # type: ignore[no-untyped-call]
    return script


def rebuild_tensor(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, *rest: Any
) -> Any:
    """Make a tensor on a storage (used by unpickling).

    It is called with the arguments that torch pickles for its own rebuild function. ``rest`` begins
    with the hooks and the dtype; only the dtype is used.
    """
    import torch

    tensor = torch.empty(0, dtype=rest[1], device=storage.device)
    return tensor.set_(storage, offset, size, stride).requires_grad_(requires_grad)


def restore_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Set a learning rate scheduler's state, and wrap its optimizer's ``step`` as torch does.

    A new scheduler replaces the ``step`` of its optimizer by a function that torch recognises.
    If the optimizer lacks this function, torch warns at the scheduler's first step. A pickled
    optimizer has lost it, so a second scheduler, which changes no learning rate, is made to set it.
    """
    from torch.optim.lr_scheduler import MultiplicativeLR

    vars(scheduler).update(state)
    MultiplicativeLR(scheduler.optimizer, lambda _epoch: 1.0)


class _MainNamespace:
    """Placeholder in a pickle for the globals of ``__main__``.

    It is unpickled as the globals of the receiving process's own ``__main__``. Functions of the
    notebook thus use the globals of the rank's ``__main__``.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return cells.main_namespace, ()


# ---- how instances of classes are pickled ----------------------------------------------------


def _reduce_module(_pickler: Any, module: types.ModuleType) -> Any:
    # cloudpickle knows them by their exact type alone, and not torch.backends.cudnn, say.
    if type(module) is types.ModuleType or sys.modules.get(module.__name__) is not module:
        return NotImplemented
    return import_module, (module.__name__,)


def _reduce_exception(_pickler: Any, error: BaseException) -> Any:
    kind = type(error)
    is_plain = kind.__reduce__ is BaseException.__reduce__
    if not is_plain or not isinstance(kind.__init__, types.FunctionType):
        return NotImplemented
    # Plain unpickling calls ``__init__`` with ``args``, whose parameters may be others.
    return copyreg.__newobj__, (kind, *error.args), vars(error) or None  # type: ignore[attr-defined]


def _reduce_file(_pickler: Any, file: io.TextIOWrapper) -> Any:
    # cloudpickle would send the text of one that is also open for reading, and lose what a rank
    # writes to it.
    if not file.closed and file.writable() and file not in (sys.stdout, sys.stderr):
        raise Refused("create it inside the function (it is open for writing)")
    return NotImplemented


def _reduce_script(_pickler: Any, script: Any) -> Any:
    import torch

    file = io.BytesIO()
    torch.jit.save(script, file)
    return rebuild_script, (pickle.PickleBuffer(file.getvalue()),)


def set_state(instance: Any, state: Any) -> None:
    """Set the state of an instance that has nothing yet (used by unpickling)."""
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    if attributes:
        vars(instance).update(attributes)
    for name, value in slots.items():
        object.__setattr__(instance, name, value)


def _reduce_without_lookup(_pickler: Any, instance: Any) -> Any:
    # Pickle asks the empty instance for __setstate__. A __getattr__ that forwards to an attribute
    # (``return getattr(self.inner, name)``) looks for that one by itself then, and for ever.
    make, arguments, state, *items = instance.__reduce_ex__(5)
    setter = None if state is None else set_state
    return make, arguments, state, *items, setter


def _reduce_torch_module(_pickler: Any, module: Any) -> Any:
    # torch refuses a parametrized one (weight_norm and the like), since plain pickle cannot send
    # the class that it made for the module; cloudpickle can.
    getstate = getattr(type(module), "__getstate__", None)
    if getattr(getstate, "__module__", "") != "torch.nn.utils.parametrize":
        return NotImplemented
    return copyreg.__newobj__, (type(module),), vars(module)  # type: ignore[attr-defined]


def _reduce_scheduler(_pickler: Any, scheduler: Any) -> Any:
    reduced = scheduler.__reduce_ex__(5)
    step = getattr(getattr(scheduler, "optimizer", None), "step", None)
    # Torch has put its own function, with the mark, in the place of a method.
    is_marked = isinstance(step, types.FunctionType)
    is_plain = len(reduced) == 5 and isinstance(reduced[2], dict)
    sets_state = hasattr(scheduler, "__setstate__")
    return (*reduced, restore_scheduler) if is_marked and is_plain and not sets_state else reduced


def later_state() -> Any:
    """Return a ``PartialState`` of accelerate that is this process's, made when it is first asked.

    To make one makes the process group, which is for the function to do.
    """
    from accelerate.state import PartialState  # type: ignore[import-untyped]

    class LaterState(PartialState):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def __reduce__(self) -> tuple[Any, ...]:
            return later_state, (), vars(self)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # of what copies or pickles it
                raise AttributeError(name)
            # Of ranks on the CPU, this variable is for its Accelerator alone: it makes one of one.
            own = {"cpu": os.environ.get("ACCELERATE_USE_CPU") == "true"}
            made = PartialState(**vars(self).get("settings", own))
            # From now on it is one like any other, also for plain pickle.
            self.__class__ = PartialState
            self.__dict__ = made.__dict__
            return getattr(made, name)

    return LaterState()


def _reduce_mapped_array(_pickler: Any, array: Any) -> Any:
    """Have a rank map the file again: the file may be larger than the memory.

    An array whose file is gone or replaced, or does not have its values, goes by value.
    """
    whole = array
    while isinstance(whole.base, type(array)):  # a slice has the file's name, and a wrong offset
        whole = whole.base
    order = "C" if array.flags.c_contiguous else "F"
    is_mapped = isinstance(whole.base, mmap.mmap) and array.size and array.flags.forc
    if not is_mapped or array.mode == "c":
        return NotImplemented
    if _file_mapped_at(array.ctypes.data) != os.path.realpath(array.filename or ""):
        return NotImplemented
    offset = whole.offset + array.ctypes.data - whole.ctypes.data
    # Mode "w+" would empty the file.
    mode = "r" if array.mode == "r" else "r+"
    return _open_again, (type(array), array.filename, array.dtype, mode, offset, array.shape, order)


def _reduce_of_hdf5(_pickler: Any, value: Any) -> Any:
    """Have a rank open a file of HDF5 again: a dataset keeps it open once it has read a sample."""
    if not value or value.file.mode != "r":
        return NotImplemented
    if isinstance(value, sys.modules["h5py"].File):
        return _open_again, (type(value), value.filename, "r")
    return getitem, (value.file, value.name)


def _open_again(kind: Callable[..., Any], file: str, *how: Any) -> Any:
    try:
        return kind(file, *how)
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"{file}, which the notebook has open, cannot be opened here ({error}): each machine "
            "needs that file, or send its values, as numpy.array(x)"
        ) from error


def _file_mapped_at(address: int) -> str:
    """Return the path of the file mapped at an address; it ends in " (deleted)" for one removed.

    Empty where the system does not tell.
    """
    with contextlib.suppress(FileNotFoundError), open("/proc/self/maps") as lines:
        for line in lines:
            place, *_, path = line.rstrip("\n").split(maxsplit=5)
            first, end = (int(bound, 16) for bound in place.split("-"))
            if first <= address < end:
                return path
    return ""


def memory_of(storage: Any) -> Any:
    """Return a numpy array of bytes on the memory of a CPU storage, which the array keeps alive."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


_INSIDE = "make it inside the function"
_GROUP = "it belongs to a process group of this process; make it inside the function"
_WRAPPED = "it is bound to a process group of this process; send its `.module` and wrap it inside"
_WIDGET = "it lives in the notebook's page; print, or report from the function, instead"
_NO_SHELL = (
    "ranks have no shell of IPython: instead of `!command` write "
    'subprocess.run("command", shell=True), instead of `%time` use time.perf_counter()'
)
_SHARED = (
    "ranks are no children of this process: send one of a manager, as "
    "`multiprocessing.Manager().Queue()`, which has locks, queues, events and values"
)

# Advice where an instance would be useless or wrong in another process; else what returns its
# reduce tuple.
_Row = str | Callable[[Any, Any], Any]
# By the name of a class, whose subclasses count, or of a module for all of its classes: importing
# torch, a widget library or another launcher to ask would cost seconds.
_BY_CLASS: dict[str, _Row] = {
    "IPython.core.autocall.IPyAutocall": "call `sys.exit()` instead",
    "IPython.core.interactiveshell.InteractiveShell": _NO_SHELL,
    "accelerate.accelerator.Accelerator": _INSIDE,
    "accelerate.data_loader.DataLoaderDispatcher": _INSIDE,
    "accelerate.data_loader.DataLoaderShard": _INSIDE,
    "accelerate.optimizer.AcceleratedOptimizer": _INSIDE,
    "accelerate.scheduler.AcceleratedScheduler": _INSIDE,
    "ctypes.CDLL": _INSIDE,
    "ipywidgets.widgets.widget.Widget": _WIDGET,
    "lightning.fabric.fabric.Fabric": _INSIDE,
    "lightning_fabric.fabric.Fabric": _INSIDE,
    "multiprocessing.connection": _SHARED,
    "multiprocessing.managers.BaseManager": "send what it has made, as `manager.dict()`",
    "multiprocessing.pool.Pool": _INSIDE,
    "multiprocessing.queues": _SHARED,
    "multiprocessing.sharedctypes": _SHARED,
    "multiprocessing.synchronize": _SHARED,
    "notebook_accel.rank.this_rank.RankContext": _INSIDE,
    "notebook_accel.launch.run.Run": "take what you need of it (`run[0]`) and send that",
    "torch.distributed.distributed_c10d.ProcessGroup": _GROUP,
    "torch.distributed.distributed_c10d.Store": _GROUP,
    "torch.distributed.device_mesh.DeviceMesh": _GROUP,
    "torch.distributed.fsdp.FSDPModule": _GROUP,
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _WRAPPED,
    "torch.distributed.tensor.DTensor": "call its `.full_tensor()` on all ranks and take that",
    "torch.nn.parallel.distributed.DistributedDataParallel": _WRAPPED,
    "tqdm.std.tqdm": "make the bar inside the function, where it is shown live",
    "_io.TextIOWrapper": _reduce_file,
    "builtins.BaseException": _reduce_exception,
    "builtins.module": _reduce_module,
    "torch.Tensor": lambda pickler, tensor: pickler._reduce_tensor(tensor),
    "torch.jit._script.ScriptModule": _reduce_script,
    "torch.jit.torch.jit.ScriptFunction": _reduce_script,
    "torch.nn.modules.module.Module": _reduce_torch_module,
    "torch.optim.lr_scheduler.LRScheduler": _reduce_scheduler,
    "torch.storage.TypedStorage": lambda _, typed: (
        rebuild_typed_storage,
        (of_torch.untyped_storage(typed), typed.dtype),
    ),
    "torch.storage.UntypedStorage": lambda pickler, storage: pickler._reduce_storage(storage),
    # A rank starts worker processes of its own; those of this process are no children of it.
    "torch.utils.data.dataloader.DataLoader": lambda _, loader: of_torch.without_iterator(
        loader
    ).__reduce_ex__(5),
    # What says which process of how many it is in; a rank would keep what it said in the notebook.
    "accelerate.state.PartialState": lambda *_: (later_state, ()),
    "transformers.training_args.TrainingArguments": lambda _, arguments: (
        *arguments.__reduce_ex__(5)[:5],
        of_libraries.restore_arguments,
    ),
}


_OWN_WAYS = {"__reduce__", "__reduce_ex__", "__setstate__"}
_REGISTERED = copyreg.dispatch_table


class Refused(Exception):  # noqa: N818 (never seen by a user; a fact, not an error)
    """Raised by a pickler for an object that would be useless in another process."""


def row_of(kind: type, rows: Mapping[str, _Row] = _BY_CLASS) -> _Row | None:
    """Return how instances of ``kind`` are pickled; None leaves them to cloudpickle."""
    advice = getattr(kind, STAYS_HOME, None)
    if isinstance(advice, str):
        return advice
    for base in kind.__mro__:
        row = rows.get(f"{base.__module__}.{base.__qualname__}") or rows.get(base.__module__)
        if row is not None:
            return row
    defined = {name for base in kind.__mro__[:-1] for name in vars(base)}
    if "__getattr__" in defined and defined.isdisjoint(_OWN_WAYS) and kind not in _REGISTERED:
        return _reduce_without_lookup
    return None


# ---- picklers ------------------------------------------------------------------------------


# A file that discards what is written to it, to test whether a value can be pickled.
NOWHERE = types.SimpleNamespace(write=len)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Base of the picklers to and from ranks."""

    dispatch_table: ClassVar[Any] = ChainMap(BY_TYPE, cloudpickle.Pickler.dispatch_table)
    by_class: ClassVar[Mapping[str, _Row]] = _BY_CLASS

    def __init__(self, file: Any, buffer_callback: Callable[[Any], Any] | None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.moved: list[tuple[str, int]] = []
        self.num_shared = 0
        self._rows: dict[type, _Row | None] = {}
        self._storages: dict[tuple[Any, ...], Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if issubclass(type(obj), NAMED_TYPES):  # not isinstance: a proxy says what it stands for
            return self._reduce_definition(obj)
        row = self._row(type(obj))
        if isinstance(row, str):
            raise Refused(row)
        return NotImplemented if row is None else row(self, obj)

    def _row(self, kind: type) -> _Row | None:
        if kind not in self._rows:
            self._rows[kind] = row_of(kind, self.by_class)
        return self._rows[kind]

    def _reduce_tensor(self, tensor: Any) -> Any:
        reduced = tensor.__reduce_ex__(5)
        held = next(iter(reduced[1]), None)
        torch: Any = sys.modules["torch"]
        if isinstance(held, torch.Tensor) and held.device.type == "cpu" != tensor.device.type:
            # Of a device without storages, as torch_xla's: it comes as one of the CPU.
            self.moved.append((str(tensor.device), tensor.nbytes))
            on_host = held.detach().requires_grad_(tensor.requires_grad)
            return self._reduce_tensor(on_host)
        # Of a newer dtype (uint16, float8), which torch's own way makes in torch.load only.
        return (rebuild_tensor, reduced[1]) if isinstance(held, torch.UntypedStorage) else reduced

    # ---- storages ----

    def _reduce_storage(self, storage: Any) -> Any:
        # Several Python objects may stand for one storage, and several storages for one memory:
        # they are known by their address and size, and what is the same is sent once.
        size = storage.nbytes()
        key = (storage.device, storage.data_ptr(), size) if size else (id(storage),)
        first = self._storages.setdefault(key, storage)
        if first is not storage:
            return itself, (first,)
        if storage.device.type != "cpu":
            self.moved.append((str(storage.device), size))
            storage = storage.cpu()
        elif storage.is_shared():
            self.num_shared += 1
        return rebuild_storage, (pickle.PickleBuffer(memory_of(storage)),)

    # ---- classes, functions, modules ----

    def _reduce_definition(self, value: Any) -> Any:
        reduced = remake(value) or super().reducer_override(value)
        if isinstance(value, type) and _goes_by_value(reduced):
            # cloudpickle leaves out __slots__; a class without its slots cannot take the state in
            # pickles of its instances.
            (kind, _, _, namespace, *_), slots = reduced[1], vars(value).get("__slots__")
            if slots and kind is type(value):
                namespace["__slots__"] = slots
        return reduced


def _goes_by_value(reduced: Any) -> bool:
    # All six items are there, the last one sets the state: so cloudpickle does it.
    return isinstance(reduced, tuple) and len(reduced) == 6


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Let picklers of calls send what cannot be pickled as its name in a library, if it has one."""
    found = {}
    for name in sorted(sys.modules, key=len, reverse=True):  # the shortest name wins
        module = sys.modules[name]
        is_module = isinstance(module, types.ModuleType) and getattr(module, "__spec__", None)
        if is_module and name.partition(".")[0] not in _NOT_IMPORTED:
            found.update({id(value): (name, key) for key, value in [*vars(module).items()]})
    token = _importable.set(found)
    try:
        yield
    finally:
        _importable.reset(token)


class CallPickler(_Pickler):
    """Pickles a function and its arguments in the notebook, for ranks."""

    by_class: ClassVar[Mapping[str, _Row]] = {
        **_BY_CLASS,
        "h5py._hl.base.HLObject": _reduce_of_hdf5,
        "numpy.memmap": _reduce_mapped_array,
    }

    def __init__(self, file: Any, buffer_callback: Callable[[Any], Any] | None = None) -> None:
        super().__init__(file, buffer_callback)
        self._importable = _importable.get({})
        self.imported: list[str] = []
        self.sent: list[Any] = []
        self.used: list[tuple[types.FunctionType, dict[str, Any]]] = []
        # Functions with the same globals get one common dict where they arrive; cloudpickle looks
        # up here which. Those of `__main__` get the receiving process's own `__main__`.
        self.globals_ref[id(cells.main_namespace())] = _MainNamespace()

    def reducer_override(self, obj: Any) -> Any:
        place = self._importable.get(id(obj))
        if place is None or isinstance(self._row(type(obj)), str) or can_be_pickled(obj):
            return super().reducer_override(obj)
        self.imported.append(".".join(place))
        return attrgetter(place[1]), (sys.modules[place[0]],)

    def _reduce_definition(self, value: Any) -> Any:
        reduced = super()._reduce_definition(value)
        if isinstance(value, TypeVar):
            is_rebuilt = value.__module__ == "__main__"
        else:
            is_rebuilt = isinstance(reduced, tuple) and not isinstance(value, type)
        if is_rebuilt or _goes_by_value(reduced):
            self.sent.append(value)
        if _goes_by_value(reduced) and isinstance(value, types.FunctionType):
            self._note_globals(value, reduced[2][1]["__globals__"])
        return reduced

    def _note_globals(self, function: types.FunctionType, used: dict[str, Any]) -> None:
        # cloudpickle sees the names that functions look up, not those of class statements
        # inside of functions.
        known = function.__globals__
        for name in global_names(function.__code__) & known.keys():
            used.setdefault(name, known[name])
        self.used.append((function, used))


def can_be_pickled(value: Any) -> bool:
    """Return whether ``value`` can travel by value."""
    pickler = CallPickler(NOWHERE, lambda _buffer: None)
    pickler._importable = {}
    try:
        pickler.dump(value)
    except (Exception, SystemExit):  # whatever a user's object does to be pickled
        return False
    return True


class SessionPickler(CallPickler):
    """Pickles a call for a session, whose ranks keep their own globals between calls.

    The globals of the notebook's functions are not pickled: a function uses the session's globals
    of the same names. The caller decides for each name in ``names`` whether to send its value as
    well, since the session itself defines some of these globals.
    """

    def __init__(self, file: Any, buffer_callback: Callable[[Any], Any] | None = None) -> None:
        super().__init__(file, buffer_callback)
        self.names: set[str] = set()

    def _note_globals(self, function: types.FunctionType, used: dict[str, Any]) -> None:
        super()._note_globals(function, used)
        if function.__globals__ is cells.main_namespace():
            self.names.update(used, global_names(function.__code__))
            used.clear()


def used_globals(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that are pickled with a function, by name."""
    pickler = CallPickler(NOWHERE)
    pickler.reducer_override(function)
    return pickler.used[0][1] if pickler.used else {}


class LeftInRank:
    """Stands in a result for a part of it that cannot be pickled.

    Attributes:
        why: what it was, and what to return instead.
    """

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return f"<{self.why}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what Python looks for, before there is a `why` as well
            raise AttributeError(name)
        raise AttributeError(f"no attribute {name!r}: {self.why}")


class ResultPickler(_Pickler):
    """Pickles a result or an exception in a rank, for the notebook."""

    by_class: ClassVar[Mapping[str, _Row]] = {
        **_BY_CLASS,
        "torch.nn.parallel.distributed.DistributedDataParallel": lambda _, wrapped: (
            itself,
            (wrapped.module,),
        ),
    }

    def __init__(
        self,
        file: Any,
        buffer_callback: Callable[[Any], Any] | None = None,
        *,
        sent: Mapping[int, Any] = _NOTHING,
        left: Mapping[int, LeftInRank] = _NOTHING,
    ) -> None:
        super().__init__(file, buffer_callback)
        self._numbers = {id(value): number for number, value in sent.items()}
        self._left = left
        self.returning: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        left = self._left.get(id(obj))
        if left is not None:
            return LeftInRank, (left.why,)
        if callable(getattr(type(obj), _UNWRAP, None)):
            return itself, (getattr(obj, _UNWRAP)(),)
        return super().reducer_override(obj)

    def _reduce_tensor(self, tensor: Any) -> Any:
        # The graph behind a loss stays in the rank. Without it torch would remake the loss as a
        # leaf that requires a gradient.
        if tensor.requires_grad and not tensor.is_leaf:
            tensor = tensor.detach()
        if _shows_little(tensor):
            tensor = tensor.clone()
        return super()._reduce_tensor(tensor)

    def _reduce_definition(self, value: Any) -> Any:
        number = self._numbers.get(id(value))
        if number is not None:
            self.returning.add(number)
            return notebook_object, (number,)
        return super()._reduce_definition(value)


def _shows_little(tensor: Any) -> bool:
    """Return whether a tensor is a small view of a large storage, such as ``big[:3]``.

    :class:`ResultPickler` then copies the view. Without the copy, the notebook would keep the
    memory of the whole storage for as long as it keeps the result.
    """
    if tensor.requires_grad or str(tensor.layout) != "torch.strided" or tensor.is_meta:
        return False
    try:
        size = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a tensor class without a storage of its own
        return False
    return bool(size >= _LARGE_BYTES and 2 * tensor.nbytes < size)


# ---- unpickling ----------------------------------------------------------------------------


def load(data: Any, *, buffers: Sequence[Any] = (), objects: Mapping[int, Any] = _NOTHING) -> Any:
    """Unpickle ``data``; the caller has made sure that it comes from a process of this package.

    Raises:
        RuntimeError: a class in the pickle raised SystemExit. It is converted, since reading a
            result must not end the process.
    """
    # Read by notebook_object, which pickle calls without arguments of ours.
    token = _objects.set(objects)
    try:
        return pickle.loads(data, buffers=buffers)
    except SystemExit as error:
        raise RuntimeError(
            f"a value cannot be made again in this process: its class raised {error!r}"
        ) from error
    finally:
        _objects.reset(token)
