"""Picklers for what crosses between the notebook and its ranks.

cloudpickle sends by value what was made in the notebook. Added here: storages of tensors travel
out of band, uncopied; what came from the notebook goes back as a reference to the notebook's own
object; and what would arrive wrong is refused.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import sys
import threading
import types
from collections import ChainMap, Counter
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import cloudpickle

from notebook_accel.launch.payload import cells
from notebook_accel.launch.payload.refusals import Refused, remedy_of
from notebook_accel.launch.payload.remade import BY_TYPE, NAMED_TYPES, remake
from notebook_accel.launch.system.import_path import import_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "CallPickler",
    "Discard",
    "ResultPickler",
    "SessionPickler",
    "itself",
    "load",
    "used_globals",
]

# Length of the reduce tuple by which an object is recognised that cloudpickle sends by value: all
# six items are there, the last one sets the state.
_BY_VALUE = 6
# From this size on, a result that is a part of a storage is copied out of it.
_LARGE_BYTES = 1 << 20
# A class may say what is sent back to the notebook in the place of its instances.
_UNWRAP = "__notebook_accel_unwrap__"
_WRAPPERS = {"torch.nn.parallel.distributed.DistributedDataParallel": "module"}

_objects: ContextVar[Sequence[Any]] = ContextVar("notebook_accel_objects")
# How many picklers have told cloudpickle to send a package by value: it has one list for all
# threads, and whoever ends first must not take out what another one still needs. What the user has
# told it is not counted, and stays.
_num_by_value: Counter[str] = Counter()
_by_value_lock = threading.RLock()


# ---- what pickles name ---------------------------------------------------------------------


def itself(value: Any) -> Any:
    """The value: a pickle names this function where something else takes an object's place."""
    return value


def notebook_object(index: int) -> Any:
    """The object that the notebook sent as number ``index``."""
    return _objects.get()[index]


def import_named(name: str) -> types.ModuleType:
    """The module of that name, imported if need be."""
    import_module(name)
    return sys.modules[name]


def rebuild_storage(buffer: Any) -> Any:
    """A torch storage on the memory of ``buffer``; a copy of it where that is read-only."""
    import torch

    view = memoryview(buffer)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def rebuild_typed_storage(storage: Any, dtype: Any) -> Any:
    """The ``TypedStorage`` around a storage, which torch pickles in every tensor."""
    from torch.storage import TypedStorage

    make: Any = TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


def rebuild_tensor(storage: Any, *rest: Any) -> Any:
    """A tensor of a newer dtype (uint16, float8): torch's own way fails outside of torch.load."""
    from torch._utils import _rebuild_tensor_v3

    make: Any = _rebuild_tensor_v3
    return make(types.SimpleNamespace(_untyped_storage=storage), *rest)


def rebuild_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception without a call of ``__init__``, whose arguments may not be in ``args``."""
    error = kind.__new__(kind, *args)
    error.args = args
    return error


def restore_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Give a scheduler its state, and the step of its optimizer the mark that torch looks for.

    Torch marks it as a scheduler is made. A pickled optimizer has lost the mark, and torch would
    warn of it at the schedule's first step.
    """
    from torch.optim.lr_scheduler import LRScheduler

    class Marking(LRScheduler):
        def _initial_step(self) -> None:
            """Leave the rate as it is."""

    vars(scheduler).update(state)
    Marking(scheduler.optimizer)


class _MainNamespace:
    """Stands for the globals of ``__main__``: functions get those of the process they come to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return cells.main_namespace, ()


# ---- picklers ------------------------------------------------------------------------------


class Discard(io.RawIOBase):
    """A file for a pickle that nobody wants, only to see whether there can be one."""

    def write(self, data: Any) -> int:
        return len(data)


def _as_usual(_value: Any) -> Any:
    return NotImplemented


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """What both directions share. Use it as a context: it undoes what it told cloudpickle.

    Attributes:
        moved: device and number of bytes of each storage that was copied to the CPU.
    """

    dispatch_table: ClassVar[Any] = ChainMap(BY_TYPE, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: Any, buffer_callback: Callable[[Any], Any] | None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.moved: list[tuple[str, int]] = []
        self._routes: dict[type, Callable[[Any], Any]] = {}
        self._storages: dict[tuple[Any, ...], Any] = {}
        # Packages that were looked at, and those of them that go by value while this one pickles.
        self._settled: set[str] = set()
        self._by_value: list[types.ModuleType] = []

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_exc: object) -> None:
        with _by_value_lock:
            for module in self._by_value:
                _num_by_value[module.__name__] -= 1
                if not _num_by_value[module.__name__]:
                    cloudpickle.unregister_pickle_by_value(module)
        self._by_value.clear()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        route = self._routes.get(kind)
        if route is None:
            route = self._routes[kind] = self._route(kind)
        return route(obj)

    def _route(self, kind: type) -> Callable[[Any], Any]:
        """How instances of ``kind`` are pickled."""
        if issubclass(kind, NAMED_TYPES):
            return self._reduce_definition
        if issubclass(kind, types.ModuleType):
            return self._reduce_module
        if issubclass(kind, BaseException):
            return _reduce_exception
        remedy = remedy_of(kind)
        if remedy:
            return _refuse(remedy)
        return self._route_torch(kind)

    def _route_torch(self, kind: type) -> Callable[[Any], Any]:
        # Where torch was never imported, nothing is torch's.
        torch: Any = sys.modules.get("torch")
        storage = getattr(torch, "storage", None)
        if storage is None:
            return _as_usual
        if issubclass(kind, storage.UntypedStorage):
            return self._reduce_storage
        if issubclass(kind, storage.TypedStorage):
            return _reduce_typed_storage
        if issubclass(kind, getattr(torch, "Tensor", ())):
            return self._reduce_tensor
        schedulers = getattr(sys.modules.get("torch.optim.lr_scheduler"), "LRScheduler", ())
        if issubclass(kind, schedulers):
            return _reduce_scheduler
        return _reduce_parametrized if _is_parametrized(kind) else _as_usual

    def _reduce_tensor(self, tensor: Any) -> Any:
        reduced = tensor.__reduce_ex__(5)
        if getattr(reduced[0], "__name__", "") == "_rebuild_tensor_v3":
            return rebuild_tensor, reduced[1]
        return reduced

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
        return rebuild_storage, (pickle.PickleBuffer(_memory(storage)),)

    # ---- classes, functions, modules ----

    def _reduce_definition(self, value: Any) -> Any:
        self._settle_module(getattr(value, "__module__", None))
        reduced = remake(value) or super().reducer_override(value)
        if isinstance(value, type) and _goes_by_value(reduced):
            _keep_slots(value, reduced)
        return reduced

    def _reduce_module(self, module: types.ModuleType) -> Any:
        self._settle_module(module.__name__)
        is_plain = type(module) is types.ModuleType
        if is_plain or sys.modules.get(module.__name__) is not module:
            return NotImplemented
        # torch.backends.cudnn and its like: cloudpickle knows modules by their exact type alone.
        return import_named, (module.__name__,)

    def _settle_module(self, name: str | None) -> None:
        """Let cloudpickle send a module by value where another process could not import it."""
        root = name.partition(".")[0] if isinstance(name, str) else "__main__"
        if root == "__main__" or root in self._settled:
            return
        self._settled.add(root)
        module = sys.modules.get(root)
        if module is None or _module_is_found(module, root):
            return
        with _by_value_lock:
            own = module.__name__
            if _num_by_value[own] or own not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                _num_by_value[own] += 1
                self._by_value.append(module)


def _goes_by_value(reduced: Any) -> bool:
    return isinstance(reduced, tuple) and len(reduced) == _BY_VALUE


def _is_made_anew(value: Any, reduced: Any) -> bool:
    """Whether the rank makes this definition anew instead of importing it.

    So it is for a TypeVar of the notebook, and for what pickle sends as a function and its
    arguments, unless it is a class.
    """
    if isinstance(value, TypeVar):
        return bool(value.__module__ == "__main__")
    return isinstance(reduced, tuple) and not isinstance(value, type)


def _keep_slots(kind: type, reduced: tuple[Any, ...]) -> None:
    """Give the class its ``__slots__`` where it arrives.

    cloudpickle leaves them out, and instances of a class without slots have another state.
    """
    arguments = reduced[1]
    slots = vars(kind).get("__slots__")
    if slots and arguments[0] is type(kind):
        arguments[3]["__slots__"] = slots


def _memory(storage: Any) -> Any:
    """An array on the memory of a CPU storage, which it keeps alive."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def _is_parametrized(kind: type) -> bool:
    getstate = getattr(kind, "__getstate__", None)
    return getattr(getstate, "__module__", "") == "torch.nn.utils.parametrize"


def _reduce_parametrized(module: Any) -> Any:
    # torch refuses it (weight_norm and the like), since plain pickle cannot send the class that
    # it made for the module; cloudpickle can.
    return copyreg.__newobj__, (type(module),), vars(module)  # type: ignore[attr-defined]


def _reduce_scheduler(scheduler: Any) -> Any:
    reduced = scheduler.__reduce_ex__(5)
    step = getattr(getattr(scheduler, "optimizer", None), "step", None)
    is_marked = hasattr(step, "_wrapped_by_lr_sched")
    is_plain = len(reduced) == 5 and isinstance(reduced[2], dict)
    sets_state = hasattr(scheduler, "__setstate__")
    return (*reduced, restore_scheduler) if is_marked and is_plain and not sets_state else reduced


def _reduce_typed_storage(storage: Any) -> Any:
    return rebuild_typed_storage, (storage._untyped_storage, storage.dtype)


def _reduce_exception(error: BaseException) -> Any:
    kind = type(error)
    is_plain = kind.__reduce__ is BaseException.__reduce__
    if not is_plain or not isinstance(kind.__init__, types.FunctionType):
        return NotImplemented
    return rebuild_exception, (kind, error.args), vars(error) or None


def _refuse(remedy: str) -> Callable[[Any], Any]:
    def refuse(_value: Any) -> Any:
        raise Refused(remedy)

    return refuse


def _module_is_found(module: types.ModuleType, name: str) -> bool:
    """Whether a process with the same ``sys.path`` finds this module."""
    spec = getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None) or getattr(spec, "origin", None)
    if spec is None and file is None:
        return False
    if not isinstance(file, str) or not os.path.isabs(file) or _is_on_path(file, name):
        return True
    # Loaded by hand from a file, or by the hook of an editable install.
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return any(find(name, None) is not None for find in finders if find is not None)


def _is_on_path(file: str, name: str) -> bool:
    folder, stem = os.path.split(file)
    stem = stem.partition(".")[0]
    if stem == "__init__":
        folder, stem = os.path.split(folder)
    return stem == name and folder in map(_absolute, import_path())


def _absolute(folder: str) -> str:
    try:
        return os.path.abspath(folder)
    except OSError:  # it is relative to the working directory, which was removed
        return folder


class CallPickler(_Pickler):
    """From the notebook to its ranks.

    Attributes:
        sent: the classes, functions and type variables that go by value, in order.
        used: each function that goes by value, and the globals that go with it.
    """

    def __init__(self, file: Any, buffer_callback: Callable[[Any], Any] | None = None) -> None:
        super().__init__(file, buffer_callback)
        self.sent: list[Any] = []
        self.used: list[tuple[types.FunctionType, dict[str, Any]]] = []
        # Functions with the same globals get one common dict where they arrive; cloudpickle looks
        # up here which. Those of `__main__` get the receiving process's own `__main__`.
        self.globals_ref[id(cells.main_namespace())] = _MainNamespace()

    def _reduce_definition(self, value: Any) -> Any:
        reduced = super()._reduce_definition(value)
        if _goes_by_value(reduced) or _is_made_anew(value, reduced):
            self.sent.append(value)
        if _goes_by_value(reduced) and isinstance(value, types.FunctionType):
            self._note_globals(value, reduced[2][1]["__globals__"])
        return reduced

    def _note_globals(self, function: types.FunctionType, used: dict[str, Any]) -> None:
        # cloudpickle sees the names that functions look up, not those of class statements
        # inside of functions.
        known = function.__globals__
        for name in cells.class_body_names(function.__code__):
            if name in known:
                used.setdefault(name, known[name])
        self.used.append((function, used))


class SessionPickler(CallPickler):
    """From the notebook to ranks that keep names of their own between calls.

    A function of the notebook uses what the ranks have under the names of its globals: which of
    them are sent as well is decided name by name, since a name may belong to the ranks.

    Attributes:
        names: of globals that what was pickled uses, the notebook's or those of the ranks.
    """

    def __init__(self, file: Any, buffer_callback: Callable[[Any], Any] | None = None) -> None:
        super().__init__(file, buffer_callback)
        self.names: set[str] = set()

    def _note_globals(self, function: types.FunctionType, used: dict[str, Any]) -> None:
        super()._note_globals(function, used)
        if function.__globals__ is cells.main_namespace():
            self.names.update(used, cells.global_names(function.__code__))
            used.clear()


def used_globals(function: types.FunctionType) -> dict[str, Any]:
    """The globals that go with a function; none where it goes by reference."""
    with CallPickler(Discard()) as pickler:
        pickler.reducer_override(function)
        return pickler.used[0][1] if pickler.used else {}


class ResultPickler(_Pickler):
    """From a rank to the notebook.

    Args:
        sent: what the notebook sent by value, as :attr:`CallPickler.sent`, remade here.
    """

    def __init__(
        self,
        file: Any,
        buffer_callback: Callable[[Any], Any] | None = None,
        *,
        sent: Sequence[Any] = (),
    ) -> None:
        super().__init__(file, buffer_callback)
        self._index = {id(value): index for index, value in enumerate(sent)}

    def _route(self, kind: type) -> Callable[[Any], Any]:
        if callable(getattr(kind, _UNWRAP, None)):
            return _unwrap
        for base in kind.__mro__:
            inner = _WRAPPERS.get(f"{base.__module__}.{base.__qualname__}")
            if inner:
                return lambda value: (itself, (getattr(value, inner),))
        return super()._route(kind)

    def _reduce_tensor(self, tensor: Any) -> Any:
        # The graph behind a loss stays in the rank. Without it torch would remake the loss as a
        # leaf that requires a gradient.
        if tensor.requires_grad and not tensor.is_leaf:
            tensor = tensor.detach()
        if _shows_little(tensor):
            tensor = tensor.clone()
        return super()._reduce_tensor(tensor)

    def _reduce_definition(self, value: Any) -> Any:
        index = self._index.get(id(value))
        if index is not None:
            return notebook_object, (index,)
        return super()._reduce_definition(value)


def _shows_little(tensor: Any) -> bool:
    """Whether most of a tensor's memory is not shown by it, as of ``big[:3]``.

    The notebook would hold all of that memory for as long as it holds the result.
    """
    if tensor.requires_grad or str(tensor.layout) != "torch.strided" or tensor.is_meta:
        return False
    try:
        size = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a tensor class without a storage of its own
        return False
    return bool(size >= _LARGE_BYTES and 2 * tensor.nbytes < size)


def _unwrap(value: Any) -> Any:
    return itself, (getattr(value, _UNWRAP)(),)


# ---- unpickling ----------------------------------------------------------------------------


def load(data: Any, *, buffers: Sequence[Any] = (), objects: Sequence[Any] = ()) -> Any:
    """The value of a pickle from a process that has proved to be ours.

    Args:
        data: the pickle.
        buffers: its out-of-band buffers.
        objects: what references to the notebook's own objects mean.

    Raises:
        RuntimeError: a class in it raised SystemExit, which must end nobody who only reads.
        Exception: whatever else its classes raise.
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
