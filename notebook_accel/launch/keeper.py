"""The keeper of a detached run: the process that launches and controls the run, as a kernel would.

    kernel --Detach (a pickled call)--> keeper: launch_packed begins the run
    kernel <--RunSnapshot-------------- keeper
    kernel --Alive--------------------> keeper: the kernel now has the run's id
    all attached kernels <--RunSnapshot (each new state)-- keeper, until the run has ended
    all attached kernels --Stop, Kill, ...---------------> keeper
    at the end the keeper sends the last state and exits

The keeper imports neither torch nor anything of the notebook. It has a template process of its own,
from which the run's ranks start. This template watches the keeper as other templates watch their
kernel: if the keeper is killed, the ranks end.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence

from notebook_accel import wire
from notebook_accel.errors import LaunchError
from notebook_accel.launch.control.call import Call
from notebook_accel.launch.control.run_state import RunState
from notebook_accel.launch.launcher import launch_packed
from notebook_accel.launch.payload import PackedCall, Parcel, pack_exception
from notebook_accel.launch.run import call_of
from notebook_accel.launch.template.handle import follow, warm
from notebook_accel.launch.transport.channel import Channel, ProtocolError, accept, encode, listen
from notebook_accel.system.limits import raise_limit

# As often as a kernel draws; and how late the end may be seen.
_LOOK_SECONDS = 0.2
_POLL_SECONDS = 0.05
# Between two snapshots passes so many times what one takes to make.
_SHARE = 20
# How long kernels get to take the last state: one may be stopped, or in code that holds its GIL.
_LAST_SECONDS = 5.0
_KILL_SECONDS = 10.0


def serve(fd: int) -> None:
    """Launch the run that a kernel sends over a socket, and control it until it has ended.

    This is the main function of the keeper process. If the launch fails, it sends the error to the
    kernel and returns. If the kernel disconnects before it has the run's id, the run is killed; but
    not a trial, whose id its sweep has saved before.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_limit()
    launcher = Channel(socket.socket(fileno=fd))
    try:
        message, fds = launcher.receive()
    except EOFError:  # the launch was interrupted
        return
    assert isinstance(message, wire.Detach), message
    # From the process that started this one, over a private pair.
    request, about, sys.path[:], imports = pickle.loads(message.request)
    try:
        if imports:
            warm()
            follow(imports)
        packed = PackedCall(parcel=Parcel(message.payload, fds), **about)
        try:
            listener = listen(request.run_id)
        except OSError as error:
            raise LaunchError(
                f"no socket can be made by which kernels attach ({error}): leave detach out"
            ) from None
        call = call_of(launch_packed(request, packed))
    except Exception as error:  # the process boundary: the kernel raises it
        raised = wire.Raised(
            kind="exception",
            type_name=type(error).__name__,
            text=str(error),
            pickled=pack_exception(error),
        )
        with contextlib.suppress(OSError):
            launcher.send(raised)
        return
    try:
        launcher.send(wire.RunSnapshot(state=encode(call.state)))
        launcher.receive()
    except (OSError, EOFError, ProtocolError):
        if request.trial is None:  # nobody has the run's id, and no kernel can attach
            call.kill()
            call.ended.wait(_KILL_SECONDS)
            call.folder.remove()
            return
    try:
        _serve_kernels(call, listener, launcher)
    finally:
        # What failed here costs the kernels their connections, never the training.
        listener.close()
        call.ended.wait(float("inf"))


def _serve_kernels(call: Call, listener: socket.socket, launcher: Channel) -> None:
    """Serve attached kernels until the run has ended and they have its last state.

    A kernel gets the newest state a few times a second, if it has taken the one before: it may be
    stopped, or in code that holds its GIL.
    """
    # Each with the state that was sent to it last.
    kernels: dict[Channel, RunState | None] = {launcher: None}
    next_state, deadline = 0.0, math.inf
    while True:
        has_ended = call.ended.is_set()  # before its state is read, which then is the last one
        now, state = time.monotonic(), call.state
        if has_ended and deadline == math.inf:
            next_state, deadline = now, now + _LAST_SECONDS
        is_done = all(sent is state and one.is_idle for one, sent in kernels.items())
        if now >= deadline or (has_ended and is_done):
            return
        ready = _wait([*kernels] if has_ended else [listener, *kernels])
        if listener in ready and (new := accept(listener)) is not None:
            kernels[new], next_state = None, now
        if now >= next_state:
            idle = [one for one, sent in kernels.items() if sent is not state and one.is_idle]
            if idle:
                snapshot = wire.RunSnapshot(state=encode(state))
                for one in idle:
                    one.post(snapshot)
                    kernels[one] = state
            # The states of many ranks that print much are large, and a kernel takes as long to read
            # one as this process to write it.
            next_state = now + max(_LOOK_SECONDS, _SHARE * (time.monotonic() - now))
            if not call.folder.path.exists():
                # Without a folder nobody could find the run, or stop it.
                with contextlib.suppress(OSError, LaunchError):
                    call.folder.create()
                    call.folder.save(state, call.config)
        gone = [one for one in kernels if not _serve_kernel(call, one, has_asked=one in ready)]
        for one in gone:
            del kernels[one]


def _wait(sources: Sequence[socket.socket | Channel]) -> list[socket.socket | Channel]:
    """Return those that can be read, or take more of what waits for them, once any can."""
    poll = select.poll()
    for one in sources:
        is_pending = isinstance(one, Channel) and not one.is_idle
        poll.register(one, select.POLLIN | (select.POLLOUT if is_pending else 0))
    ready = {fd for fd, _ in poll.poll(1000 * _POLL_SECONDS)}
    return [one for one in sources if one.fileno() in ready]


def _serve_kernel(call: Call, kernel: Channel, *, has_asked: bool) -> bool:
    """Obey a kernel, and write what waits for it; return whether it is still there."""
    try:
        for message, _ in kernel.drain() if has_asked else ():
            if isinstance(message, wire.Stop):
                call.stop(message.grace)
            elif isinstance(message, wire.Interrupt):
                call.press(1)
            elif isinstance(message, wire.Kill):
                call.kill()
            elif isinstance(message, wire.DumpStacks):
                text = call.stacks(message.rank)
                kernel.post(wire.Stacks(text=text, monotonic=message.monotonic))
        kernel.flush(block=False)
    except (EOFError, OSError, ProtocolError):
        kernel.close()
        return False
    return True
