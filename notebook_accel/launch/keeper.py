"""The keeper of a detached run: the process that launches and controls the run, as a kernel would.

    kernel --Detach (a pickled call)--> keeper: launch_packed begins the run
    kernel <--Alive-------------------- keeper
    kernel --Alive--------------------> keeper: the kernel now has the run's id
    attached kernels --"stop", "state", "stacks"--> the run's folder --> keeper
    attached kernels <------------- the run's folder <-- states, stacks, results, logs, metrics

A kernel asks for each state anew, so that nobody writes one that nobody reads.

The keeper imports neither torch nor anything of the notebook. It has a template process of its own,
from which the run's ranks start. This template watches the keeper as other templates watch their
kernel: if the keeper is killed, the ranks end.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import sys
import time

from notebook_accel import wire
from notebook_accel.errors import LaunchError
from notebook_accel.launch.control.call import Call
from notebook_accel.launch.control.run_state import RunState
from notebook_accel.launch.launcher import launch_packed
from notebook_accel.launch.payload import PackedCall, Parcel, pack_exception
from notebook_accel.launch.run import call_of
from notebook_accel.launch.template.handle import follow, warm
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.system.limits import raise_limit

# As often as a kernel draws.
_LOOK_SECONDS = 0.1
# Between two states passes so many times what one takes to write.
_SHARE = 20
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
        launcher.send(wire.Alive())
        launcher.receive()
    except (OSError, EOFError, ProtocolError):
        if request.trial is None:  # nobody has the run's id, and no kernel can attach
            call.kill()
            call.ended.wait(_KILL_SECONDS)
            call.folder.remove()
            return
    finally:
        launcher.close()
    told: RunState | None = None
    try:
        has_ended = False
        while not has_ended:
            has_ended = call.ended.wait(_LOOK_SECONDS)
            with contextlib.suppress(OSError, LaunchError):
                told = _serve_kernels(call, told)
    finally:
        # What failed here costs kernels their view of the run, never the training.
        call.ended.wait(float("inf"))


def _serve_kernels(call: Call, told: RunState | None) -> RunState | None:
    """Answer what kernels ask in the run's folder; return the state that they have by now."""
    folder, state = call.folder, call.state
    if not folder.path.exists():
        # Without a folder nobody could find the run, or stop it.
        folder.create()
        folder.save(state, call.config)
    # Each by a name of its own: two kernels may ask at once.
    for asked in folder.left("stacks-"):
        rank = folder.take(asked) or ""
        folder.leave(f"answer-{asked}", call.stacks(int(rank) if rank.isdecimal() else None))
    if not folder.has_left("state"):
        return told
    began = time.monotonic()
    if state is not told:
        folder.save(state)
    folder.take("state")
    # The states of many ranks that print much are large.
    call.ended.wait(_SHARE * (time.monotonic() - began))
    return state
