"""Pickling of a function and its arguments for the ranks, and of results on the way back.

    notebook                                          rank
    pack_call -> Packed ------------------------> unpack_call -> UnpackedCall
    unpack_result, unpack_exception <- Packed, bytes - pack_result, pack_exception

Packing copies no tensor: the buffers of a :class:`Packed` are views of the memory that they were
found in. Nothing here looks at who sent a pickle: the channel has proved that before.
"""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_accel.launch.payload import cells
from notebook_accel.launch.payload.cells import CellSource, name_cells
from notebook_accel.launch.payload.culprits import (
    arguments,
    cannot_return,
    cannot_travel,
    cause,
    variables,
)
from notebook_accel.launch.payload.pickling import (
    CallPickler,
    ResultPickler,
    SessionPickler,
    load,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "CellSource",
    "Packed",
    "PackedCall",
    "Registry",
    "UnpackedCall",
    "name_cells",
    "pack_call",
    "pack_exception",
    "pack_result",
    "unpack_call",
    "unpack_exception",
    "unpack_result",
]

P = TypeVar("P", CallPickler, ResultPickler)


@dataclass(frozen=True)
class Packed:
    """A pickled value with its out-of-band buffers.

    Attributes:
        buffers: first the cells that its functions were written in, pickled; then the memory of
            its tensors and arrays, and last the pickle itself; contiguous, of bytes.
    """

    buffers: tuple[memoryview, ...] = ()


@dataclass(frozen=True)
class Registry:
    """The notebook's own objects, to which references in results are resolved."""

    objects: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PackedCall:
    """A pickled function with its arguments, ready for any number of ranks.

    Attributes:
        packed: for :func:`unpack_call`.
        registry: for :func:`unpack_result` and :func:`unpack_exception`.
        notices: one line each for the person.
        models: names of the notebook's torch modules that travel along.
        uses_torch: whether the pickle, or the function's module, names torch.
    """

    packed: Packed
    registry: Registry
    notices: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    uses_torch: bool = False


@dataclass(frozen=True, kw_only=True)
class UnpackedCall:
    """A function and its arguments, as unpickled in a rank.

    Attributes:
        sent: the notebook's classes and functions, as they were remade here in this call and,
            in a session, in those before it.
        sources: of the cells that they were written in.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sent: tuple[Any, ...] = ()
    sources: tuple[CellSource, ...] = ()


# ---- to the ranks --------------------------------------------------------------------------


def pack_call(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    sources: Sequence[CellSource] = (),
    session: Registry | None = None,
) -> PackedCall:
    """Pickle a function, its arguments, and what the function uses of the notebook.

    Args:
        function: to be called on each rank.
        args, kwargs: what it is called with.
        sources: of the notebook's cells; only those of functions that travel go along.
        session: what earlier calls sent to the same ranks, which may come back from this one.
            The notebook's functions use what these ranks have under the names of their globals,
            which do not travel along.

    Raises:
        LaunchError: something cannot travel, or would be wrong where it arrives; the message
            names it and says what to do.
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    make = CallPickler if session is None else SessionPickler
    before = () if session is None else session.objects
    try:
        # `own.sent` fills up while what stands before it is pickled: it must come last.
        body, buffers, pickler = _dump(
            make, lambda own: (function, args, kwargs, len(before), own.sent)
        )
    except (Exception, SystemExit) as error:  # whatever a user's object does to be pickled
        raise cannot_travel(function, args, kwargs, error) from cause(error)
    # Each of the call's objects from the notebook, by its name.
    named = [arguments(function, args, kwargs), *(variables(*used) for used in pickler.used)]
    files = {used.__code__.co_filename for used, _ in pickler.used}
    used_sources = tuple(source for source in sources if source.filename in files)
    return PackedCall(
        packed=_as_packed(body, buffers, used_sources),
        registry=Registry((*before, *pickler.sent)),
        notices=_moved_notice(pickler.moved),
        models=_unique(name for each in named for name in each if _is_model(each[name])),
        # A function that goes by reference has nothing of its module in the pickle.
        uses_torch=b"torch" in body
        or (not pickler.used and "torch" in getattr(function, "__globals__", ())),
    )


def unpack_call(packed: Packed, *, sent_before: Sequence[Any] | None = None) -> UnpackedCall:
    """Unpickle a function and its arguments, in a rank.

    In the first call a process gets a new ``__main__``. It holds what the function uses, and
    ``linecache`` the cells' sources.

    Args:
        packed: its buffers writable and private to this process: tensors live in them.
        sent_before: :attr:`UnpackedCall.sent` of the call before, whose ``__main__`` stays, with
            the names that it left there; None for the first call.
    """
    sources, body, buffers = _open_pickle(packed)
    cells.install_sources(sources)
    if sent_before is None:
        cells.fresh_main()
    function, args, kwargs, num_before, sent = load(body, buffers=buffers)
    cells.fill_main(sent)
    # A call that failed to unpack here left no objects: None fills their places, so that indices
    # still match `Registry.objects` in the notebook.
    known = [*(sent_before or ()), *[None] * num_before][:num_before]
    return UnpackedCall(
        function=function,
        args=args,
        kwargs=kwargs,
        sent=(*known, *sent),
        sources=sources,
    )


def _dump(
    make: Callable[..., P], value: Callable[[P], object]
) -> tuple[bytes, list[pickle.PickleBuffer], P]:
    """Pickle ``value(pickler)``; return the pickle, its out-of-band buffers and the pickler."""
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = make(file, buffers.append)
    pickler.dump(value(pickler))
    # Not getbuffer(): to collect its view crashes Python 3.12.0 and 3.12.1, and makes later ones
    # write to stderr (https://github.com/python/cpython/issues/111049, 111331).
    return file.getvalue(), buffers, pickler


def _as_packed(
    body: bytes,
    buffers: Sequence[pickle.PickleBuffer],
    sources: tuple[CellSource, ...] = (),
) -> Packed:
    views = (buffer.raw() for buffer in buffers)
    return Packed((memoryview(pickle.dumps(sources)), *views, memoryview(body)))


def _open_pickle(
    packed: Packed,
) -> tuple[tuple[CellSource, ...], memoryview, tuple[memoryview, ...]]:
    """Return the cells' sources, the pickle, and the pickle's buffers."""
    sources, *buffers, body = packed.buffers
    return load(sources), body, tuple(buffers)


# ---- notices for the person ---------------------------------------------------------------


def _moved_notice(moved: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    if not moved:
        return ()
    size = sum(size for _, size in moved) / 1e6
    devices = ", ".join(_unique(device for device, _ in moved))
    tensors = "1 tensor" if len(moved) == 1 else f"{len(moved)} tensors"
    text = (
        f"{tensors} ({size:.1f} MB) on {devices} arrive in the ranks on the CPU: "
        "prepare the model there, or move them with `.to(accelerator.device)`."
    )
    return (text,)


def _unique(values: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _is_model(value: Any) -> bool:
    module = getattr(sys.modules.get("torch.nn"), "Module", None)
    return module is not None and isinstance(value, module)


# ---- back to the notebook ------------------------------------------------------------------


def pack_result(value: object, call: UnpackedCall | None = None) -> Packed:
    """Pickle the value that a rank returned.

    Tensors go to the CPU and lose their graph; a model loses its strategy's wrapper. Classes and
    functions that came from the notebook go back as references to the notebook's own.

    Args:
        value: what the function returned.
        call: the function, from :func:`unpack_call`.

    Raises:
        TypeError: something in it cannot be pickled; the message names it.
    """
    sent = call.sent if call else ()
    try:
        body, buffers, _ = _dump(partial(ResultPickler, sent=sent), lambda _: value)
    except (Exception, SystemExit) as error:  # whatever a user's object does to be pickled
        raise cannot_return(value, sent, error) from cause(error)
    return _as_packed(body, buffers)


def unpack_result(packed: Packed, registry: Registry) -> Any:
    """Unpickle the result of a rank, with the notebook's own classes.

    Args:
        packed: its buffers writable: tensors live in them.
        registry: of the call that it answers.

    Raises:
        Exception: whatever the classes of its values raise when they are remade.
    """
    _, body, buffers = _open_pickle(packed)
    return load(body, buffers=buffers, objects=registry.objects)


def pack_exception(error: BaseException, call: UnpackedCall | None = None) -> bytes | None:
    """Pickle the exception that a rank raised; None if it cannot be pickled."""
    file = io.BytesIO()
    try:
        ResultPickler(file, sent=call.sent if call else ()).dump(error)
    except (Exception, SystemExit):  # an exception may hold anything
        return None
    return file.getvalue()


def unpack_exception(data: bytes | None, registry: Registry) -> BaseException | None:
    """Unpickle the exception that a rank raised; None if it does not unpickle."""
    if data is None:
        return None
    try:
        error = load(data, objects=registry.objects)
    except (Exception, SystemExit):  # a class that is not importable here, or that refuses
        return None
    return error if isinstance(error, BaseException) else None
