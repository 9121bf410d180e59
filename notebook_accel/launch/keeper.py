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
import pickle
import signal
import socket
import sys
import threading
import time

from notebook_accel import wire
from notebook_accel.errors import LaunchError
from notebook_accel.launch.control.call import Call
from notebook_accel.launch.control.run_state import RunState
from notebook_accel.launch.launcher import launch_packed
from notebook_accel.launch.payload import PackedCall, Parcel, pack_exception
from notebook_accel.launch.run import call_of
from notebook_accel.launch.template.handle import follow, warm
from notebook_accel.launch.transport import user_socket
from notebook_accel.launch.transport.channel import Channel, ProtocolError, encode
from notebook_accel.system.limits import raise_limit
from notebook_accel.system.processes import is_readable

# As often as a kernel draws.
_LOOK_SECONDS = 0.2
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
            listener = user_socket.listen(request.run_id)
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
    """Serve attached kernels until the run has ended and they have its last state."""
    kernels = [_Kernel(call, launcher)]
    while not call.ended.is_set():
        channel = None
        if is_readable(listener, _LOOK_SECONDS):
            channel = user_socket.accept(listener)
        if channel is not None:
            kernels.append(_Kernel(call, channel))
        if not call.folder.path.exists():
            # Without a folder nobody could find the run, or stop it.
            with contextlib.suppress(OSError, LaunchError):
                call.folder.create()
                call.folder.save(call.state, call.config)
    listener.close()
    deadline = time.monotonic() + _LAST_SECONDS
    for kernel in kernels:
        kernel.sender.join(max(0.0, deadline - time.monotonic()))


class _Kernel:
    """An attached kernel: one thread sends it states, another takes its requests."""

    def __init__(self, call: Call, channel: Channel) -> None:
        self._call = call
        self._channel = channel
        self._lock = threading.Lock()  # of who sends
        self.sender = threading.Thread(target=self._send_states, daemon=True)
        self.sender.start()
        threading.Thread(target=self._take_requests, daemon=True).start()

    def _send(self, message: wire.Message) -> None:
        with self._lock:
            self._channel.send(message)

    def _send_states(self) -> None:
        """Send the run's newest state whenever it has changed; return after the last state.

        The pause after a state is longer if encoding the state took long, since states of many
        ranks are large. Of the states that come within a pause only the newest is sent.
        """
        seen: RunState | None = None
        pause, has_ended = 0.0, False
        with contextlib.suppress(OSError):  # the kernel is gone
            while not has_ended:
                has_ended = self._call.ended.wait(pause)
                pause = _LOOK_SECONDS
                if seen is not self._call.state:
                    seen, begun = self._call.state, time.monotonic()
                    snapshot = wire.RunSnapshot(state=encode(seen))
                    # The states of many ranks that print much are large, and a kernel takes as
                    # long to read one as this process to write it.
                    pause = max(pause, _SHARE * (time.monotonic() - begun))
                    self._send(snapshot)

    def _take_requests(self) -> None:
        try:
            while True:
                message, _ = self._channel.receive()
                if isinstance(message, wire.Stop):
                    self._call.stop(message.grace)
                elif isinstance(message, wire.Interrupt):
                    self._call.press(1)
                elif isinstance(message, wire.Kill):
                    self._call.kill()
                elif isinstance(message, wire.DumpStacks):
                    threading.Thread(target=self._dump, args=(message,), daemon=True).start()
        except (EOFError, OSError, ProtocolError):
            with self._lock:
                self._channel.close()

    def _dump(self, asked: wire.DumpStacks) -> None:
        text = self._call.stacks(asked.rank)
        with contextlib.suppress(OSError):
            self._send(wire.Stacks(text=text, monotonic=asked.monotonic))
