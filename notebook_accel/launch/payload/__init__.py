"""Pickling of a function and its arguments for the ranks, and of results on the way back.

    notebook                                          rank
    pack_call -> PackedCall --Parcel--> Packed --> unpack_call -> UnpackedCall
    unpack_result, unpack_exception <- Packed, bytes - pack_result, pack_exception

A pickled value goes into a message by :func:`pack`, and comes out of it by :func:`unpack`::

    Packed --pack--> (wire.Packet, descriptors) ==channel==> unpack --> Packed

A small value is copied into the message. A large value is written to one memory segment
(system/segment.py), whose descriptor is sent with the message: all processes of a machine share one
copy, mapped copy-on-write. A channel to another machine sends the segment's bytes, and the receiver
makes a segment of them (transport/frames.py). Code that packs or unpacks is the same in both cases.

The buffers of a :class:`Packed` are views of the memory of CPU tensors, not copies; only small
views of large storages are copied, in results. Nothing here checks who sent a pickle: the sender
was authenticated when the connection was made.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary, finalize

from notebook_accel import wire
from notebook_accel.launch.payload import cells, culprits, pickling
from notebook_accel.launch.payload.cells import CellSource
from notebook_accel.launch.payload.pickling import CallPickler, LeftInRank, ResultPickler
from notebook_accel.system import segment
from notebook_accel.system.interrupts import held

# Not as a part of the path of a file.
_TORCH = re.compile(rb"(?<![\w/.-])torch\b")
# Up to this size a value is copied into the message that it belongs to. For a small value the ten
# system calls of a segment cost more than the copies.
MAX_INLINE_BYTES = 1 << 16
# Parts of a result that may be left in the rank: for each, the whole result is pickled once more.
_MAX_LEFT = 10

P = TypeVar("P", CallPickler, ResultPickler)


@dataclass(frozen=True)
class Packed:
    """A pickled value; the memory of its tensors and arrays is outside of the pickle (out of band).

    Attributes:
        buffers: first a pickle: of a call, the sources of the notebook cells that define its
            functions, and what ranks do before they unpickle it; of a result, the numbers of the
            notebook's objects in it. Then the memory of each tensor and array; last, the pickle
            itself. All are contiguous views of bytes.
    """

    buffers: tuple[memoryview, ...] = ()


class Parcel:
    """A packet with its descriptors, which are closed by ``close``, or with this object."""

    def __init__(self, packet: wire.Packet, fds: Iterable[int] = ()) -> None:
        self.packet, self.fds = packet, tuple(fds)
        self.close = finalize(self, _close, self.fds)


@dataclass
class Registry:
    """The notebook's classes, functions and type variables that calls sent to ranks by value.

    Where a result contains one of them, the pickle of the result has only its number.
    :func:`unpack_result` replaces the number by the notebook's own object, so that a returned
    instance has the notebook's class.

    Attributes:
        earlier: those of earlier calls of the session that the notebook still has: weak references.
        num_sent: how many numbers were given. None is given twice: a rank that could not unpickle
            a call may still have the objects of an older one.
    """

    sent: Mapping[int, Any] = field(default_factory=dict)
    earlier: Mapping[int, Any] = field(default_factory=dict)
    held: Mapping[int, Any] = field(default_factory=dict)
    num_sent: int = 0

    @property
    def objects(self) -> dict[int, Any]:
        return {**self.earlier, **self.sent}


@dataclass(frozen=True, kw_only=True)
class PackedCall:
    """A pickled function with its arguments, ready for any number of ranks."""

    parcel: Parcel
    registry: Registry = field(default_factory=Registry)
    notices: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    uses_torch: bool = False


@dataclass(frozen=True, kw_only=True)
class UnpackedCall:
    """A function and its arguments, as unpickled in a rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sent: Mapping[int, Any] = field(default_factory=dict)


# ---- to the ranks --------------------------------------------------------------------------


def pack_call(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    sources: Sequence[CellSource] = (),
    session: Registry | None = None,
    setup: Sequence[Any] = (),
) -> PackedCall:
    """Pickle a function, its arguments, and the notebook's definitions and variables that it uses.

    Args:
        session: None for a launch. For a session, whose ranks serve several calls: the registry of
            the previous call (empty for the first). The notebook's functions then travel without
            their global variables, and use the session's variables of the same names.
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    make = CallPickler if session is None else pickling.SessionPickler
    session = Registry() if session is None else session
    before = session.objects

    def content(own: CallPickler) -> tuple[Any, ...]:
        # `own.sent` fills up while what stands before it is pickled: it must come last.
        return function, args, kwargs, [*before], session.num_sent, own.sent

    body, buffers, pickler = culprits.pickled(
        partial(_dump, make, content), partial(culprits.cannot_travel, function, args, kwargs)
    )
    # Each of the call's objects from the notebook, by its name.
    named = [
        culprits.arguments(function, args, kwargs),
        *(culprits.variables(*used) for used in pickler.used),
    ]
    files = {used.__code__.co_filename for used, _ in pickler.used}
    used_sources = tuple(source for source in sources if source.filename in files)
    module_class = getattr(sys.modules.get("torch.nn"), "Module", ())
    with held():  # an interrupt before the parcel owns the segment would leave that open
        parcel = Parcel(*pack(_as_packed(body, buffers, (used_sources, tuple(setup)))))
    return PackedCall(
        parcel=parcel,
        registry=Registry(
            sent=dict(enumerate(pickler.sent, session.num_sent)),
            earlier=WeakValueDictionary(before),
            held=before,
            num_sent=session.num_sent + len(pickler.sent),
        ),
        notices=tuple(_notices(pickler)),
        models=_unique(
            name for each in named for name in each if isinstance(each[name], module_class)
        ),
        # A function that goes by reference has nothing of its module in the pickle.
        uses_torch=bool(_TORCH.search(body))
        or (not pickler.used and "torch" in getattr(function, "__globals__", ())),
    )


def unpack_call(
    packed: Packed,
    *,
    sent_before: Mapping[int, Any] | None = None,
    take_over: Callable[[Sequence[Any]], object] = bool,
) -> UnpackedCall:
    """Unpickle a function and its arguments, in a rank.

    The first call that a process unpacks replaces its ``__main__`` by an empty module. Every call
    adds the notebook's classes and functions to ``__main__``, and the cells' sources to
    ``linecache``.

    Args:
        sent_before: :attr:`UnpackedCall.sent` of this process's previous call; None for the first.
    """
    (sources, setup), body, buffers = _open_pickle(packed)
    cells.install_sources(sources)
    if sent_before is None:
        cells.fresh_main()
    take_over(setup)
    function, args, kwargs, still_there, first, sent = pickling.load(body, buffers=buffers)
    cells.fill_main(sent)
    # What the notebook no longer has is dropped here, too. A call that failed to unpack here left
    # no objects.
    known = {number: one for number, one in (sent_before or {}).items() if number in still_there}
    return UnpackedCall(
        function=function, args=args, kwargs=kwargs, sent={**known, **dict(enumerate(sent, first))}
    )


def _dump(
    make: Callable[..., P], value: Callable[[P], object]
) -> tuple[bytes, list[pickle.PickleBuffer], P]:
    """Pickle an object; return the pickle, its out-of-band buffers, and the pickler."""
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = make(file, buffers.append)
    pickler.dump(value(pickler))
    # Not getbuffer(): to collect its view crashes Python 3.12.0 and 3.12.1, and makes later ones
    # write to stderr (https://github.com/python/cpython/issues/111049, 111331).
    return file.getvalue(), buffers, pickler


def _as_packed(
    body: bytes, buffers: Sequence[pickle.PickleBuffer], head: tuple[Any, ...]
) -> Packed:
    views = (buffer.raw() for buffer in buffers)
    return Packed((memoryview(pickle.dumps(head)), *views, memoryview(body)))


def _open_pickle(packed: Packed) -> tuple[Any, memoryview, tuple[memoryview, ...]]:
    """Split packed buffers into their head, the pickle, and its out-of-band buffers."""
    head, *buffers, body = packed.buffers
    return pickling.load(head), body, tuple(buffers)


# ---- notices for the person ---------------------------------------------------------------


def _notices(pickler: CallPickler) -> Iterator[str]:
    moved = pickler.moved
    if moved:
        size = sum(size for _, size in moved) / 1e6
        devices = ", ".join(_unique(device for device, _ in moved))
        yield (
            f"{_tensors(len(moved))} ({size:.1f} MB) on {devices} arrive in the ranks on the CPU: "
            "prepare the model there, or move them with `.to(accelerator.device)`."
        )
    if pickler.num_shared:
        tensors = _tensors(pickler.num_shared)
        yield f"{tensors} in shared memory: each rank has a copy, and what it writes only it sees."
    names = _unique(f"`{name}`" for name in pickler.imported if not name.startswith("sys."))
    if names:
        yield (
            f"{', '.join(names)} cannot be pickled, and ranks import it: what cells changed in it, "
            "change in the function or in a `%%everywhere` cell."
        )


def _tensors(number: int) -> str:
    return "1 tensor" if number == 1 else f"{number} tensors"


def _unique(values: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


# ---- back to the notebook ------------------------------------------------------------------


def pack_result(
    value: object, call: UnpackedCall | None = None, notice: Callable[[str], None] | None = None
) -> Packed:
    """Pickle the value that a rank returned.

    Tensors are moved to the CPU and detached from the autograd graph; a model is taken out of its
    wrapper, such as DDP. For classes and functions that came from the notebook, only references to
    the notebook's own are sent.

    Args:
        call: the call that returned it, from :func:`unpack_call`; None pickles without references.
        notice: if given, a part that cannot be pickled (a prepared loader beside a model) is
            replaced by a :class:`LeftInRank`, and this is called with a sentence about it: hours of
            training are not lost for it.

    Raises:
        TypeError: ``value`` cannot be pickled as a whole, or a part of it cannot and there is no
            ``notice``; the message names it.
    """
    sent = call.sent if call else {}
    left: dict[int, LeftInRank] = {}
    leaving: list[tuple[Any, str]] = []  # these are kept, so that no other object has an id of left
    leaves_whole = False
    make = partial(ResultPickler, sent=sent, left=left)
    while True:
        try:
            body, buffers, pickler = _dump(make, lambda _: value)
            if left:
                pickling.load(body, buffers=buffers, objects=sent)
            break
        except (Exception, SystemExit) as error:  # whatever a user's object does to be pickled
            part, why = culprits.part_that_cannot_return(value, make, error)
            if notice is None or leaves_whole or (part is value and not left):
                raise TypeError(why) from culprits.cause(error)
            if part is value or id(part) in left or len(left) == _MAX_LEFT:
                # An object cannot be made again without what it holds, as an Event without its
                # lock: the whole of such an entry or attribute stays here.
                leaves_whole = True
                left.clear()
                leaving[:] = culprits.direct_parts_that_cannot_return(value, make)
            else:
                leaving.append((part, why))
            left.update((id(one), LeftInRank(why)) for one, why in leaving)
    for _, why in leaving:
        assert notice is not None
        notice(why)
    return _as_packed(body, buffers, tuple(pickler.returning))


def numbers_in(result: Packed) -> tuple[int, ...]:
    """Return the numbers (:class:`Registry`) of the notebook's objects that a result contains."""
    return tuple(pickling.load(result.buffers[0]))


def unpack_result(packed: Packed, registry: Registry) -> Any:
    """Unpickle, in the notebook, what :func:`pack_result` packed in a rank."""
    _, body, buffers = _open_pickle(packed)
    return pickling.load(body, buffers=buffers, objects=registry.objects)


def pack_exception(error: BaseException, call: UnpackedCall | None = None) -> bytes | None:
    """Pickle the exception that a rank raised; return None if it cannot be pickled.

    ``call`` is the call that raised the exception, from :func:`unpack_call`; None if the call could
    not be unpickled.
    """
    file = io.BytesIO()
    try:
        ResultPickler(file, sent=call.sent if call else {}).dump(error)
    except (Exception, SystemExit):  # an exception may hold anything
        return None
    return file.getvalue()


def unpack_exception(data: bytes | None, registry: Registry) -> BaseException | None:
    """Unpickle, in the notebook, the exception that a rank raised.

    Returns:
        the exception; None if ``data`` is None or cannot be unpickled here.
    """
    if data is None:
        return None
    try:
        error = pickling.load(data, objects=registry.objects)
    except (Exception, SystemExit):  # a class that is not importable here, or that refuses
        return None
    return error if isinstance(error, BaseException) else None


# ---- into messages, and out of them ---------------------------------------------------------


def pack(packed: Packed) -> tuple[wire.Packet, tuple[int, ...]]:
    """Convert a pickled value into a packet (a field for a message) and descriptors.

    Returns:
        The packet, and the descriptor of its segment if it is large, which the caller closes.

    Raises:
        OSError: the machine is out of memory or of descriptors.
    """
    sizes = tuple(buffer.nbytes for buffer in packed.buffers)
    if sum(sizes) <= MAX_INLINE_BYTES:
        return wire.Packet(sizes=sizes, inline=tuple(map(bytes, packed.buffers))), ()
    return wire.Packet(sizes=sizes), (segment.seal(packed.buffers),)


def unpack(packet: wire.Packet, fds: Sequence[int]) -> Packed:
    """Return the pickled value of a received packet; the inverse of :func:`pack`.

    Raises:
        ValueError: buffers are missing, or the descriptor is no valid segment for them.
        OSError: the segment could not be mapped.
    """
    try:
        if fds:
            buffers = segment.attach(fds[0], packet.sizes)
        else:
            buffers = tuple(memoryview(bytearray(part)) for part in packet.inline)
    finally:
        _close(fds)
    if len(buffers) != len(packet.sizes):
        raise ValueError(f"a packet of {len(packet.sizes)} buffers came with {len(buffers)}")
    return Packed(buffers)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
