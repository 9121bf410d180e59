"""Write and read states as torch files, without trusting the files that are read.

All files of a checkpoint are such files, except safetensors, the parts of sharded tensors, and what
DeepSpeed writes. A pickle may name any function and have it called. What is read here may name only
functions and classes that are known to do no harm: those that torch itself allows, the common types
of Python and numpy, and enums, named tuples and plain dataclasses of modules that the program has
imported already. A state that needs any other name is refused when it is written, because it can
still be changed then.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import enum
import fractions
import itertools
import pathlib
import pickle
import sys
import types
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.private import of_torch

# Pickles of protocol 2, which torch writes, have Python 2's names.
_MODULES_OF_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_NAMES_OF_PYTHON_2 = {
    "__builtin__.long": ("builtins", "int"),
    "__builtin__.unicode": ("builtins", "str"),
    "__builtin__.xrange": ("builtins", "range"),
}
_COMMON_TYPES = (
    *(bool, int, float, complex, str, bytes, bytearray),
    *(list, tuple, dict, set, frozenset, range, slice, object),
    *(collections.defaultdict, collections.deque, collections.Counter, collections.OrderedDict),
    *(dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, uuid.SafeUUID),
    *(types.SimpleNamespace, argparse.Namespace),
    *(pathlib.Path, pathlib.PosixPath, pathlib.WindowsPath),
    *(pathlib.PurePath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
)


def write_state(state: Any, path: Path, owner: str) -> None:
    """Write a state to a file that :func:`read_state` reads."""
    try:
        torch.save(state, path)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"{path.name}: the state of {owner} cannot be saved: {error}. Give plain values in its "
            "state_dict()"
        ) from error
    named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    refused = sorted(name for name in named if not is_safe_name(name))
    if refused:
        raise ConfigError(
            f"{path.name}: the state of {owner} holds {', '.join(refused)}, which load_state would "
            "not read, since a file that names it could run any code. Give plain values in its "
            "state_dict() (dataclasses.asdict, str, tolist, ...), or call "
            "torch.serialization.add_safe_globals([...]) with what you trust, both when saving "
            "and when loading"
        )


def read_state(path: Path, options: dict[str, Any] | None = None) -> Any:
    """Read a state from a file that :func:`write_state` or another library has written.

    Args:
        options: further arguments of ``torch.load``. Without ``map_location``, tensors are put on
            the CPU. With ``weights_only=False`` the file is trusted and may run any code.

    Raises:
        NotebookAccelError: the file is empty or broken, or names something that is not known to be
            safe.
        FileNotFoundError, PermissionError, MemoryError: as raised by torch; they do not mean that
            the file is damaged.
    """
    given = dict(options or {})
    plain = {name: value for name, value in given.items() if name == "weights_only"}
    try:
        with _reading(path, 'load_state(..., load_kwargs={"weights_only": False})'):
            arguments = {"map_location": "cpu", **given}
            if arguments.pop("weights_only", True):
                arguments["pickle_module"] = _SafePickle
            return torch.load(path, weights_only=False, **arguments)
    except NotebookAccelError as error:
        if plain == given:
            raise
        read_state(path, plain)  # raises where the options are not what is wrong
        raise ConfigError(
            f"{path} is whole, and cannot be read with {given}: {error.__cause__}"
        ) from error


def read_pickle(path: Path, names: Mapping[str, Any]) -> Any:
    """Read a plain pickle without trusting it.

    Raises:
        NotebookAccelError: the file is empty or broken, or names something that is not known to be
            safe.
        FileNotFoundError, PermissionError, MemoryError: as raised by Python; they do not mean that
            the file is damaged.
    """
    with (
        _reading(path, "torch.serialization.add_safe_globals([...]) with that"),
        path.open("rb") as file,
    ):
        return _SafeUnpickler(file, names=names).load()


@contextmanager
def _reading(path: Path, way: str) -> Iterator[None]:
    """Run a block that reads a file; errors name the file, and ``way``, by which to trust it."""
    try:
        yield
    except _UnknownNameError as error:
        raise NotebookAccelError(
            f"{path} names {error}, which is not read, since a file that names it could run any "
            f"code. If you trust the file: {way}"
        ) from error
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:
        raise NotebookAccelError(explain(path, error)) from error


def on_host(options: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``options`` without ``map_location``: :func:`read_state` then reads to the CPU."""
    return {name: value for name, value in (options or {}).items() if name != "map_location"}


def is_safe_name(name: str) -> bool:
    """Return whether a pickle may use a name ("module.name"), because it is known to do no harm."""
    module, _, own = name.rpartition(".")
    return _find(module, own) is not None


def explain(path: Path, error: Exception) -> str:
    """Return a message that says that a file could not be read, why, and what to do."""
    size = path.stat().st_size if path.exists() else 0
    state = f"could not be read ({size:,} bytes)" if size else "is empty"
    return (
        f"{path} {state}: {type(error).__name__}: {error}. If it was damaged after it was written, "
        "or copied in part, load an earlier checkpoint"
    )


class _UnknownNameError(pickle.UnpicklingError):
    """A pickle names a function or class that is not known to be safe."""


class _SafeUnpickler(pickle.Unpickler):
    def __init__(
        self, file: Any, *, names: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(file, **options)
        self._names = names or {}

    def find_class(self, module: str, name: str) -> Any:
        found = self._names.get(f"{module}.{name}") or _find(module, name)
        if found is None:
            raise _UnknownNameError(f"{module}.{name}")
        return found


# What torch.load takes as its pickle module.
_SafePickle = SimpleNamespace(
    __name__="safe pickle",
    Unpickler=_SafeUnpickler,
    load=lambda file, **options: _SafeUnpickler(file, **options).load(),
    UnpicklingError=pickle.UnpicklingError,
)


def _find(module: str, name: str) -> Any:
    """Return the object that a pickle means by a name; None if it is not known to be safe."""
    module, name = _NAMES_OF_PYTHON_2.get(f"{module}.{name}", (module, name))
    module = _MODULES_OF_PYTHON_2.get(module, module)
    known = _known().get(f"{module}.{name}") or _of_user().get(f"{module}.{name}")
    if known is not None:
        return known
    # A name in a file never causes an import, not even through a module's own `__getattr__`, which
    # may import what it is asked for: hence `vars`.
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    return found if isinstance(found, type) and _is_plain(found) else None


def _is_plain(kind: type) -> bool:
    """Return whether making an instance of a class runs none of the class's own code.

    That holds for enums, named tuples, and dataclasses with fields and nothing else.
    """
    if issubclass(kind, enum.Enum):
        return True
    if issubclass(kind, tuple):
        return hasattr(kind, "_fields") and kind.__bases__ == (tuple,)
    settings = vars(kind).get("__dataclass_params__")
    if settings is None or not settings.init or kind.__new__ is not object.__new__:
        return False
    # A dataclass may have written its __init__ itself; the one that is made for it is in no file.
    code = getattr(vars(kind).get("__init__"), "__code__", None)
    if code is None or code.co_filename != "<string>":
        return False
    ways = ("__post_init__", "__setstate__", "__reduce__", "__reduce_ex__")
    own = {name for name in ways if getattr(kind, name, None) is not getattr(object, name, None)}
    if own == {"__setstate__"}:  # frozen ones with slots get theirs from dataclasses
        set_state: Any = kind.__setstate__  # type: ignore[attr-defined]
        return bool(set_state.__module__ == "dataclasses")
    return not own


def _of_user() -> dict[str, Any]:
    """Return what the user told torch to trust (``add_safe_globals``): names and their objects."""
    named = (
        item if isinstance(item, tuple) else (item, f"{item.__module__}.{item.__qualname__}")
        for item in torch.serialization.get_safe_globals()
    )
    return {name: value for value, name in named}


@cache
def _known() -> dict[str, Any]:
    """Return the names of torch, Python and numpy that a pickle may use, with their objects.

    Names are spelled as pickles spell them, which differs between versions.
    """
    known: dict[str, Any] = of_torch.loadable_names()
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"]}
    numbers = {np.dtype(code).type for code in np.typecodes["All"]}
    for kind in (*_COMMON_TYPES, np.ndarray, np.dtype, *kinds, *numbers):
        known[f"{kind.__module__}.{kind.__qualname__}"] = kind
    # What arrays and numbers of numpy are made by, as pickle asks them. numpy 2 moved its core;
    # files of either version name their own.
    makers = (
        ("multiarray", np.empty(0).__reduce__()[0]),
        ("multiarray", np.float64(0).__reduce__()[0]),
        ("numeric", np.empty(0).__reduce_ex__(5)[0]),
    )
    for (module, make), core in itertools.product(makers, ("numpy._core", "numpy.core")):
        known[f"{core}.{module}.{make.__name__}"] = make
    known["pathlib._local.PosixPath"] = pathlib.PosixPath  # Python 3.13
    known["pathlib._local.WindowsPath"] = pathlib.WindowsPath
    return known
