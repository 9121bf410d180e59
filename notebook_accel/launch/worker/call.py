"""One call in a rank: the function is unpacked and run, and what came of it becomes a message."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import RunStopped
from notebook_accel.launch import payload, wire
from notebook_accel.launch.payload import cells
from notebook_accel.launch.rank import KeptError
from notebook_accel.launch.transport.segment import pack, unpack
from notebook_accel.launch.worker import displays
from notebook_accel.launch.worker.tracebacks import error_text, exit_code, format_error, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accel.launch.rank import LaunchedContext
    from notebook_accel.launch.worker.interrupts import Interrupts

__all__ = ["Outcome", "run_call"]

# What torch says in a rank when it has lost another rank.
_LOST_PEER = re.compile(
    r"connection (closed|reset) by (remote )?peer|connection refused|broken pipe|was likely closed"
    r"|remote process exited|failed to (recv|send)|socket (timeout|closed)"
    r"|nccl communicator was aborted|ncclremoteerror|connectfullmesh failed",
    re.IGNORECASE,
)
# The same in two parts, with anything in between. As one pattern, "store.*closed", it took 44 s
# for 132 KB full of "store".
_LOST_PEER_PARTS = (
    (re.compile(r"store", re.IGNORECASE), re.compile(r"closed|timed? ?out", re.IGNORECASE)),
    (re.compile(r"read error", re.IGNORECASE), re.compile(r"gloo", re.IGNORECASE)),
    (re.compile(r"timed out waiting", re.IGNORECASE), re.compile(r"send|recv", re.IGNORECASE)),
)
_SHM = re.compile(r"unable to \w+[^\n]{0,200}(?:</torch_|shared memory)|out of shared memory")
_FULL_SHM = (
    "Likely, /dev/shm is full or too small for the batches of a DataLoader's workers: make it "
    "larger (docker run --shm-size=8g), or load in the rank itself (num_workers=0)."
)
# How NCCL passes data between GPUs of one machine that cannot reach each other's memory.
_SHM_OF_NCCL = re.compile(r"creating shared memory segment|/dev/shm/nccl")
_FULL_SHM_OF_NCCL = (
    "Likely, /dev/shm is full or too small for NCCL: make it larger (docker run --shm-size=8g), or "
    'do without, which is slower (env={"NCCL_SHM_DISABLE": "1"}).'
)
# A larger pickle of an exception stays in the rank: its text is enough.
_MAX_PICKLED_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call ended in this rank.

    Attributes:
        message: what the agent is told.
        fds: descriptors that go along; the sender closes them once they are sent.
        exitcode: what the process ends with, if there is no other call.
        sent: the notebook's classes and functions that this call and those before it brought;
            None where no call could be unpacked yet.
    """

    message: wire.Returned | wire.Raised
    fds: tuple[int, ...] = ()
    exitcode: int = 0
    sent: tuple[Any, ...] | None = None


def run_call(
    message: wire.BeginCall,
    fds: list[int],
    *,
    context: LaunchedContext,
    interrupts: Interrupts,
    sent_before: Sequence[Any] | None,
    setup_error: BaseException | None,
) -> Outcome:
    """Call the function of ``message``, and say how it ended.

    Args:
        message: what to call.
        fds: the descriptors that came with it.
        context: of this rank.
        interrupts: lets a KeyboardInterrupt through while the call runs.
        sent_before: the notebook's classes and functions that the calls before brought; None in
            the first one.
        setup_error: why the rank could not get ready, which is then how the call ends.
    """
    if message.keeps_error:
        # The frames of the error before go, with all that they hold of the device's memory.
        context.kept_error = None
    try:
        return _run(message, fds, context, interrupts, sent_before, setup_error)
    except KeyboardInterrupt as error:
        # It came while the end of the function was being noted, before interrupts were turned off
        # for it. No second one follows: the agent sends one SIGINT for each call.
        interrupts.end_call()
        return _raised(error, context, None)


def _run(
    message: wire.BeginCall,
    fds: list[int],
    context: LaunchedContext,
    interrupts: Interrupts,
    sent_before: Sequence[Any] | None,
    setup_error: BaseException | None,
) -> Outcome:
    call: payload.UnpackedCall | None = None
    try:
        # Before any interrupt is raised: it closes the descriptors, which nobody else does.
        packed = unpack(message.payload, fds)
        interrupts.begin_call(message.call)
        if setup_error is not None:
            raise setup_error
        call = payload.unpack_call(packed, sent_before=sent_before)
        if message.by_value:
            call = replace(call, sent=())
        context.report(wire.CallStarted)
        try:
            value = call.function(*call.args, **call.kwargs)
        except (RunStopped, SystemExit) as error:
            _end_forked_child(context, error)
            if isinstance(error, RunStopped) or _is_success(error):
                _finish(context)
            raise
        _end_forked_child(context)
        _finish(context)
        packed = payload.pack_result(value, call)
        # What was printed, by the pickling of the result too, may take long to be written.
        _flush_output()
        # No interrupt is raised from here on: one that comes after the segment is made would lose
        # its descriptor.
        interrupts.end_call()
        return _returned(packed, context, call, is_none=value is None)
    except BaseException as error:  # the process boundary: whatever it is, the notebook is told
        interrupts.end_call()
        _end_forked_child(context, error)
        if message.keeps_error:
            context.kept_error = KeptError(error)
        return _raised(error, context, call, is_ending=interrupts.has_seen(message.call))


def _finish(context: LaunchedContext) -> None:
    """Do what was put off to the end of the function: a checkpoint in the making is waited for."""
    # A copy: each of them takes itself out.
    for finish in tuple(context.before_return.values()):
        finish()


def _end_forked_child(context: LaunchedContext, error: BaseException | None = None) -> None:
    """A child that the function forked, and that came back here, is no rank: it ends."""
    if context.is_own_process:
        return
    if error is not None:
        _write_error(format_error(error, caller=__file__))
    _flush_output()
    os._exit(error is not None)


def _returned(
    packed: payload.Packed,
    context: LaunchedContext,
    call: payload.UnpackedCall | None,
    *,
    is_none: bool,
) -> Outcome:
    packet, fds = pack(packed)
    message = wire.Returned(
        run=context.run,
        call=context.call,
        rank=context.rank,
        value=packet,
        is_none=is_none,
        made_group=context.made_group,
        lost_group=context.lost_group,
    )
    return Outcome(message=message, fds=fds, sent=call.sent if call is not None else None)


def _raised(
    error: BaseException,
    context: LaunchedContext,
    call: payload.UnpackedCall | None,
    *,
    is_ending: bool = False,
) -> Outcome:
    """How a call ended that raised; ``is_ending`` where its agent had interrupted it before."""
    if _is_success(error):
        packed = payload.pack_result(None, call)
        _flush_output()
        return _returned(packed, context, call, is_none=True)
    kind, exitcode = _classify(error)
    text = cells.name_cells(format_error(error, caller=__file__))
    hint = _shm_hint(error, text)
    if hint:
        text = f"{text.rstrip()}\n\n{hint}\n"
    if kind == "lost peer":
        # The backend guesses that a rank has crashed; this one cannot know what the other did.
        _write_error(
            "this rank lost its connection to one that has returned, failed or left the process "
            "group: the error of the run says which. The backend says:\n"
        )
    if kind in ("exception", "lost peer"):
        _write_error(text)
    _flush_output()
    pickled = payload.pack_exception(error, call) if call is not None else None
    rescued: wire.Packet | None = None
    fds: tuple[int, ...] = ()
    if call is not None and (kind in ("stopped", "interrupted") or is_ending):
        rescued, fds = _pack_training(context, call)
    message = wire.Raised(
        run=context.run,
        call=context.call,
        rank=context.rank,
        kind=kind,
        type_name=type(error).__name__,
        text=shorten(error_text(error)),
        traceback=shorten(text),
        exitcode=exitcode,
        pickled=pickled if pickled is not None and len(pickled) <= _MAX_PICKLED_BYTES else None,
        rescued=rescued,
        made_group=context.made_group,
    )
    sent = call.sent if call is not None else None
    return Outcome(message=message, fds=fds, exitcode=exitcode, sent=sent)


def _is_success(error: BaseException) -> bool:
    """Whether it is ``sys.exit()`` or ``sys.exit(0)``."""
    return isinstance(error, SystemExit) and exit_code(error) == 0


def _pack_training(
    context: LaunchedContext, call: payload.UnpackedCall
) -> tuple[wire.Packet | None, tuple[int, ...]]:
    """This rank's part of what was being trained, in the first form that can be pickled."""
    problem: Exception | None = None
    try:
        for part in context.parts_to_rescue():
            try:
                return pack(payload.pack_result(part, call))
            except Exception as error:  # whatever classes of the user's do when they are pickled
                problem = error
    except Exception as error:  # or when they are asked for their state
        problem = error
    if problem is not None:
        context.notice(f"what was being trained could not be rescued: {error_text(problem)}")
    return None, ()


def _classify(error: BaseException) -> tuple[str, int]:
    """The kind of a ``wire.Raised``, and the exit code of the process."""
    if isinstance(error, RunStopped):
        return "stopped", 0
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            _write_error(f"{error_text(error)}\n")
        return "exit", exit_code(error)
    return ("lost peer" if _lost_peer(error) else "exception"), 1


def _shm_hint(error: BaseException, traceback: str) -> str:
    """What to do where the machine's shared memory is full; "" for any other error."""
    if _is_full_shm(error, traceback):
        return _FULL_SHM
    is_of_nccl = isinstance(error, RuntimeError) and _SHM_OF_NCCL.search(shorten(error_text(error)))
    return _FULL_SHM_OF_NCCL if is_of_nccl else ""


def _is_full_shm(error: BaseException, traceback: str) -> bool:
    """Whether a loader's worker found no room for a batch in the machine's shared memory."""
    if isinstance(error, OSError):
        # The locks of its queues lie there too.
        return error.errno == errno.ENOSPC and "SemLock" in traceback
    return isinstance(error, RuntimeError) and bool(_SHM.search(shorten(error_text(error))))


def _lost_peer(error: BaseException) -> bool:
    """Whether the exception only says that another rank is gone."""
    is_torch = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    is_plain = type(error) is RuntimeError
    return (is_torch or is_plain) and _says_lost_peer(error_text(error))


def _says_lost_peer(text: str) -> bool:
    text = shorten(text)
    if _LOST_PEER.search(text):
        return True
    begins = [(first.search(text), then) for first, then in _LOST_PEER_PARTS]
    return any(begin and then.search(text, begin.end()) for begin, then in begins)


def _write_error(text: str) -> None:
    """Write to the rank's log. A full disk, or a stream of the user's own, hides no error."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)


def _flush_output() -> None:
    """What was displayed and printed in the call goes out before the agent hears of its end."""
    displays.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
