"""The keeper of a detached run: the process that conducts the run in the place of a kernel.

    Detach, a packed call --> launch_packed, as in a kernel; the run has begun
    RunSnapshot --> the kernel that launched; its Alive says that somebody has the run's id
    until the run has ended: each new state --> all attached kernels; Stop, Kill, ... <-- them
    the last state --> them; the socket is removed, and the process ends

It imports no torch and nothing of the notebook's; its own template watches it, as it would a
kernel: where the keeper is killed, the ranks end.
"""

from __future__ import annotations

import contextlib
import pickle
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from notebook_accel.errors import LaunchError
from notebook_accel.launch import wire
from notebook_accel.launch.launcher import launch_packed
from notebook_accel.launch.payload import pack_exception
from notebook_accel.launch.run import call_of
from notebook_accel.launch.system.open_files import raise_limit
from notebook_accel.launch.text.terminal_text import escaped
from notebook_accel.launch.transport import user_socket
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.launch.transport.segment import unpack

if TYPE_CHECKING:
    from notebook_accel.launch.control.call import Call
    from notebook_accel.launch.control.state import RunState

__all__ = ["serve"]

# As often as a kernel draws.
_LOOK_SECONDS = 0.2
# Between two snapshots passes so many times what one takes to make.
_SHARE = 20
# How long kernels get to take the last state: one may be stopped, or in code that holds its GIL.
_LAST_SECONDS = 5.0
_KILL_SECONDS = 10.0


def serve(fd: int) -> None:
    """Launch the run that is received over the socket ``fd``, and conduct it to its end."""
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
    request, packed, sys.path[:] = pickle.loads(message.request)
    listener: socket.socket | None = None
    try:
        packed = replace(packed, packed=unpack(message.payload, fds))
        call = call_of(launch_packed(request, packed))
        folder = call.folder.path
        try:
            listener = user_socket.listen(folder)
        except OSError as error:
            _drop(call)
            raise LaunchError(
                f"no socket can be made in {folder} ({error}): set NOTEBOOK_ACCEL_RUNS to a "
                "folder of a local disk, or leave detach out"
            ) from None
    except Exception as error:  # the process boundary: the kernel raises it
        raised = wire.Raised(
            kind="exception",
            type_name=type(error).__name__,
            text=str(error),
            traceback="",
            pickled=pack_exception(error),
        )
        with contextlib.suppress(OSError):
            launcher.send(raised)
        return
    try:
        launcher.send(_snapshot(call))
        launcher.receive()
    except (OSError, EOFError, ProtocolError):  # nobody has the run's id
        listener.close()
        _drop(call)
        return
    try:
        _Keeper(call, listener, launcher).serve()
    except Exception:  # what fails here costs the kernels their connections, never the training
        listener.close()
    finally:
        user_socket.remove(folder)
        while not call.ended.wait(_LAST_SECONDS):
            pass


def _drop(call: Call) -> None:
    """Kill a run of which nobody has a handle, and remove its folder."""
    call.kill()
    call.ended.wait(_KILL_SECONDS)
    call.folder.remove()


def _snapshot(call: Call) -> wire.RunSnapshot:
    try:
        state = msgspec.msgpack.encode(call.state)
    except UnicodeEncodeError:  # text that UTF-8 cannot carry
        plain = msgspec.to_builtins(call.state, builtin_types=(bytes,))
        state = msgspec.msgpack.encode(escaped(plain))
    return wire.RunSnapshot(
        state=state,
        timeout=call.timeout,
        timed_out=call.timed_out,
        rescued_as=call.rescued_as,
    )


@dataclass(eq=False)
class _Kernel:
    """An attached kernel, and the last state that was sent to it."""

    channel: Channel
    seen: RunState | None = None


class _Keeper:
    """Serves the kernels that are attached to a run."""

    def __init__(self, call: Call, listener: socket.socket, launcher: Channel) -> None:
        self._call = call
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._kernels: list[_Kernel] = []
        self._answers: list[tuple[_Kernel, wire.Stacks]] = []
        self._next_snapshot = 0.0
        self._add(launcher)

    def serve(self) -> None:
        """Serve until the run has ended, and the attached kernels have its last state."""
        while not self._call.ended.is_set():
            self._turn()
        self._selector.unregister(self._listener)
        self._listener.close()
        deadline = time.monotonic() + _LAST_SECONDS
        while self._kernels and time.monotonic() < deadline:
            self._turn()
            for kernel in list(self._kernels):
                if kernel.seen is self._call.state and kernel.channel.is_idle:
                    self._remove(kernel)

    def _turn(self) -> None:
        for key, _ in self._selector.select(_LOOK_SECONDS):
            if key.data is not None:
                self._hear(key.data)
            elif (channel := user_socket.accept(self._listener)) is not None:
                self._add(channel)
        state, now = self._call.state, time.monotonic()
        # One that reads slowly misses states between: it gets the newest when it takes more.
        behind = [one for one in self._kernels if one.seen is not state and one.channel.is_idle]
        if behind and (now >= self._next_snapshot or state.has_ended):
            snapshot = _snapshot(self._call)
            # The states of many ranks that print much are large, and a kernel takes as long to read
            # one as this process to write it.
            self._next_snapshot = now + _SHARE * (time.monotonic() - now)
            for kernel in behind:
                kernel.seen = state
                kernel.channel.post(snapshot)
        while self._answers:
            kernel, answer = self._answers.pop(0)
            kernel.channel.post(answer)
        for kernel in list(self._kernels):
            try:
                kernel.channel.flush(block=False)
            except OSError:
                self._remove(kernel)

    def _add(self, channel: Channel) -> None:
        kernel = _Kernel(channel)
        self._kernels.append(kernel)
        self._selector.register(channel.fileno(), selectors.EVENT_READ, kernel)

    def _remove(self, kernel: _Kernel) -> None:
        self._selector.unregister(kernel.channel.fileno())
        self._kernels.remove(kernel)
        kernel.channel.close()

    def _hear(self, kernel: _Kernel) -> None:
        try:
            messages = kernel.channel.drain()
        except (EOFError, OSError, ProtocolError):
            self._remove(kernel)
            return
        for message, _ in messages:
            if isinstance(message, wire.Stop):
                self._call.stop(message.grace)
            elif isinstance(message, wire.Interrupt):
                self._call.press(1)
            elif isinstance(message, wire.Kill):
                self._call.kill()
            elif isinstance(message, wire.DumpStacks):
                threading.Thread(target=self._dump, args=(kernel, message), daemon=True).start()

    def _dump(self, kernel: _Kernel, asked: wire.DumpStacks) -> None:
        text = self._call.stacks(asked.rank)
        self._answers.append((kernel, wire.Stacks(text=text, monotonic=asked.monotonic)))
