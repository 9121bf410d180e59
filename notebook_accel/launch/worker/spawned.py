"""Gives the notebook's definitions to processes that a rank starts by spawn or forkserver.

    rank: Process.start --dump--> process: _begin fills its ``__main__``, then runs the target

Such a process has an empty ``__main__``, since cells are in no file that it could run again. What a
loader's worker needs comes with it by value. A pool gets its tasks later, by the names of classes
and functions in ``__main__``: all of those that can be pickled come as well.
"""

from __future__ import annotations

import io
import traceback
import types
from collections import ChainMap
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

from notebook_accel.launch.payload import cells
from notebook_accel.launch.payload.pickling import NAMED_TYPES, CallPickler, can_be_pickled


def install() -> None:
    """Have multiprocessing call :func:`_dump` when it starts a process."""
    reduction.dump = _dump


class _StartPickler(CallPickler):
    """Pickles as ``multiprocessing`` does (locks go, tensors are shared), definitions by value."""

    dispatch_table: ClassVar[Any] = ChainMap(
        reduction.ForkingPickler(io.BytesIO()).dispatch_table, CallPickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        is_definition = issubclass(type(obj), NAMED_TYPES)
        return self._reduce_definition(obj) if is_definition else NotImplemented


def _dump(obj: Any, file: Any, protocol: int | None = None) -> None:  # noqa: ARG001
    pickler = _StartPickler(file)
    others = _definitions() if isinstance(obj, BaseProcess) else []
    # `sent` fills up while what stands before it is pickled: it must come last.
    pickler.dump(_Start((obj, others, pickler.sent)))


class _Start(tuple[Any, ...]):
    """The arguments of :func:`_begin`; it is unpickled as what that returns."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, tuple(self)


def _begin(value: Any, _others: Sequence[Any], sent: Sequence[Any]) -> Any:
    cells.fill_main(sent)
    return value


def _definitions() -> list[Any]:
    """Return the classes and functions in this rank's ``__main__`` that can be pickled."""
    # Not what runs: no task calls the training function, which may use all of the data.
    running = {frame.f_code for frame, _ in traceback.walk_stack(None)}
    return [
        value
        for value in cells.main_namespace().copy().values()
        if isinstance(value, (type, types.FunctionType))
        and value.__module__ == "__main__"
        and getattr(value, "__code__", None) not in running
        and can_be_pickled(value)
    ]
