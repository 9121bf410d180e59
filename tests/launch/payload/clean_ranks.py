"""Stand-ins for a notebook and for its ranks, with nothing between them but the payload.

A :class:`Notebook` runs cells as a kernel does, in a ``__main__`` of its own. Its ranks are forked
from a process that was started by exec and has never seen a cell, as the real ones are.
"""

import linecache
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import traceback
import types
from typing import Any

import pytest

from notebook_accel.launch import payload
from notebook_accel.launch.payload import cells, unpack
from notebook_accel.system import segment

_MESSAGE_BYTES = 1 << 18
_SECONDS = 60


class Raised(Exception):
    def __init__(self, text: str, error: BaseException | None) -> None:
        super().__init__(text)
        self.error = error


class Ranks:
    """A clean process that forks a rank for each call."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.launch.payload.clean_ranks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        self._socket.close()
        self._process.wait(_SECONDS)

    def call(self, packed: payload.PackedCall) -> tuple[dict[str, Any], tuple[memoryview, ...]]:
        _send(self._socket, opened(packed), cwd=os.getcwd(), path=sys.path)
        return _receive(self._socket)


def opened(packed: payload.PackedCall) -> payload.Packed:
    return unpack(packed.parcel.packet, [*map(os.dup, packed.parcel.fds)])


class Notebook:
    """Cells in a ``__main__`` of their own."""

    def __init__(self, patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
        self.main = types.ModuleType("__main__")
        patch.setitem(sys.modules, "__main__", self.main)
        self.sources: list[payload.CellSource] = []
        self._ranks = ranks

    def __getitem__(self, name: str) -> Any:
        return vars(self.main)[name]

    def cell(self, text: str) -> None:
        number = len(self.sources) + 1
        text = textwrap.dedent(text)
        filename = f"/nowhere/ipykernel_1/{number}.py"
        source = payload.CellSource(filename, f"Cell In[{number}]", text)
        self.sources.append(source)
        lines = text.splitlines(keepends=True)
        linecache.cache[filename] = (len(text), None, lines, filename)
        exec(compile(text, filename, "exec", dont_inherit=True), vars(self.main))

    def pack(self, function: str, *args: Any, **kwargs: Any) -> payload.PackedCall:
        return payload.pack_call(self[function], args, kwargs, sources=self.sources)

    def launch(self, function: str, *args: Any, **kwargs: Any) -> Any:
        packed = self.pack(function, *args, **kwargs)
        reply, buffers = self._ranks.call(packed)
        if reply["kind"] == "raised":
            error = payload.unpack_exception(reply["pickled"], packed.registry)
            raise Raised(reply["text"], error)
        return payload.unpack_result(payload.Packed(buffers), packed.registry)


def _send(to: socket.socket, packed: payload.Packed, **more: Any) -> None:
    sizes = [buffer.nbytes for buffer in packed.buffers]
    message = pickle.dumps({"sizes": sizes, **more})
    fd = segment.seal(packed.buffers)
    socket.send_fds(to, [message], [fd])
    os.close(fd)


def _receive(source: socket.socket) -> tuple[dict[str, Any], tuple[memoryview, ...]]:
    data, fds, _, _ = socket.recv_fds(source, _MESSAGE_BYTES, 1)
    if not data:
        raise EOFError
    message = pickle.loads(data)
    buffers = segment.attach(fds[0], message["sizes"])
    os.close(fds[0])
    return message, buffers


def _serve(kernel: socket.socket) -> None:
    import torch
    import torch._dynamo

    while True:
        try:
            message, buffers = _receive(kernel)
        except EOFError:
            return
        pid = os.fork()
        if not pid:
            signal.alarm(_SECONDS)
            torch.set_num_threads(1)
            _be_rank(kernel, message, buffers)
            os._exit(0)
        del buffers
        if os.waitpid(pid, 0)[1]:
            _send(kernel, payload.Packed(), kind="raised", text="died", pickled=None)


def _be_rank(kernel: socket.socket, message: dict[str, Any], buffers: Any) -> None:
    os.chdir(message["cwd"])
    sys.path[:] = message["path"]
    call = None
    try:
        call = payload.unpack_call(payload.Packed(buffers))
        value = call.function(*call.args, **call.kwargs)
        _send(kernel, payload.pack_result(value, call), kind="returned")
    except BaseException as error:
        text = cells.name_cells(traceback.format_exc())
        pickled = payload.pack_exception(error, call)
        _send(kernel, payload.Packed(), kind="raised", text=text, pickled=pickled)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
