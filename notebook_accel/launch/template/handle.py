"""The template: a clean process from which agents fork, with torch already imported.

It is started by exec in its own session, imports and then only forks: no thread, no device, no
parallel region, no module of the user's. So a fork of it is safe, whatever the notebook's kernel
has done, and costs milliseconds. :class:`Template` is the kernel's side, :func:`serve` the
process's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from notebook_accel.config import parse_flag
from notebook_accel.errors import LaunchError
from notebook_accel.launch import wire
from notebook_accel.launch.control.interrupts import held
from notebook_accel.launch.system import processes
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.launch.transport.handshake import AuthenticationError, connect, new_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Template", "template", "warm"]

# Read when a library is loaded: a change needs a new template.
_READ_AT_IMPORT = (
    "LD_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "PYTHON",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "TORCH_LOGS",
)
# The number of threads is set in each rank; the template itself must never start one.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_START_SECONDS = 120.0
_ANSWER_SECONDS = 60.0

_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p] + {path!r}; "
    "from notebook_accel.launch.template.process import serve; serve({fd}, {kernel})"
)


class Template:
    """The kernel's handle of a template process. Safe to use from several threads."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        secret = new_secret()
        self._lock = threading.Lock()
        self._exits: dict[int, int] = {}
        self._devices: dict[tuple[tuple[str, str], ...], wire.Devices] = {}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _boot_code(theirs.fileno())],
                env=_clean(environment),
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            stdin.write(secret)
        self._socket = ours
        self._secret = secret
        self._channel: Channel | None = None
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether a launch would not have to wait for the process."""
        # It speaks first, once all is imported.
        return self._channel is not None or _is_readable(self._socket, 0)

    def wait_until_ready(self) -> None:
        """Return once the process has imported all that it preloads.

        Raises:
            LaunchError: it ended before that.
        """
        with self._lock:
            self._ready()

    def fork_agent(self, sock: socket.socket, *, run: str, secret: bytes) -> int:
        """Fork an agent that accepts the other end of ``sock`` by ``secret``; gives its pid.

        Raises:
            LaunchError: the template died, or could not fork.
        """
        request = wire.ForkAgent(run=run, secret=secret)
        answer = self._ask(request, wire.Forked, fds=(sock.fileno(),))
        if answer.error:
            raise LaunchError(
                f"no process could be forked for the run: {answer.error}. "
                "Free memory or processes on this machine, then launch again."
            )
        return answer.pid

    def count_devices(self, environment: Mapping[str, str]) -> wire.Devices:
        """The accelerators that a process with this environment sees."""
        chosen = tuple(sorted(item for item in environment.items() if "VISIBLE" in item[0]))
        if chosen not in self._devices:
            request = wire.CountDevices(run=uuid4().hex, environment=dict(environment))
            self._devices[chosen] = self._ask(request, wire.Devices)
        return self._devices[chosen]

    def exit_of(self, pid: int, *, timeout: float) -> int | None:
        """The exit code of an agent that ended, negative for a signal; None if not known."""
        deadline = time.monotonic() + timeout
        while pid not in self._exits and time.monotonic() < deadline:
            with self._lock:
                if self._channel is None or not self._note_exits(self._channel):
                    break
            time.sleep(0.01)
        return self._exits.get(pid)

    def close(self) -> None:
        """Let the process end once its agents have."""
        self._socket.close()
        self._stderr.close()
        if self._channel is not None:
            self._channel.close()

    def kill(self) -> None:
        """End the process, and all that it forked, now."""
        processes.kill_tree([self.pid])
        self._process.wait()
        self.close()

    def _ready(self) -> Channel:
        if self._channel is None:
            try:
                _is_readable(self._socket, _START_SECONDS)
                with held():
                    channel = connect(self._socket, self._secret, timeout=_ANSWER_SECONDS)
                    channel.receive()
            except (AuthenticationError, ProtocolError, EOFError, OSError) as error:
                raise LaunchError(self._why_it_died()) from error
            self._channel = channel
        return self._channel

    def _ask(
        self, request: wire.Message, answer: type[wire.M], *, fds: tuple[int, ...] = ()
    ) -> wire.M:
        with self._lock:
            channel = self._ready()
            try:
                with held():
                    channel.send(request, fds)
                while True:
                    message, _ = channel.receive()
                    # An interrupted call may have left its answer behind.
                    if isinstance(message, answer) and message.run == request.run:
                        return message
                    self._note(message)
            except (EOFError, OSError) as error:
                raise LaunchError(self._why_it_died()) from error

    def _note_exits(self, channel: Channel) -> bool:
        try:
            for message, _ in channel.drain():
                self._note(message)
        except (EOFError, OSError, ProtocolError):
            return False
        return True

    def _note(self, message: wire.Message) -> None:
        if isinstance(message, wire.AgentExited):
            self._exits[message.pid] = message.exitcode

    def _why_it_died(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        how = "stopped answering" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {processes.signal_name(-code)}"
        return (
            f"the process from which ranks are started (pid {self.pid}) {how}. "
            "Launch again: a new one is made. If it happens again, look for too little memory, "
            f"and whether `{sys.executable} -c 'import torch._dynamo'` works in a terminal."
            f"{self._last_words()}"
        )

    def _last_words(self) -> str:
        if self._stderr.closed:
            return ""
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace").strip()
        return f" Its last words:\n{text[-2000:]}" if text else ""


def _is_readable(sock: socket.socket, seconds: float) -> bool:
    """Whether there is something to read before the time is over."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(seconds))


_templates: dict[tuple[object, ...], Template] = {}
_templates_lock = threading.Lock()


def template(environment: Mapping[str, str] | None = None) -> Template:
    """The template for launches with this environment; made when there is none that fits."""
    environment = os.environ if environment is None else environment
    key = _key(environment)
    with held(), _templates_lock:
        found = _templates.get(key)
        if found is None or not found.alive:
            _close_all()
            found = _templates[key] = Template(environment)
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        return found


def _close_all() -> None:
    for found in _templates.values():
        found.close()
    _templates.clear()


def warm() -> None:
    """Start the template, so that the first launch finds it ready; returns at once.

    ``NOTEBOOK_ACCEL_WARM=0`` in the environment keeps it from being started before a launch.
    """
    # At the priority of any other process: one without privileges could lower its own, but never
    # raise it again, and the ranks would inherit it.
    if parse_flag("NOTEBOOK_ACCEL_WARM", os.environ.get("NOTEBOOK_ACCEL_WARM") or "1"):
        template()


def _key(environment: Mapping[str, str]) -> tuple[object, ...]:
    """What a template depends on: this process, interpreter, torch, and variables read early."""
    variables = tuple(
        sorted(
            (name, value)
            for name, value in environment.items()
            if name.startswith(_READ_AT_IMPORT) and name not in _THREADS
        )
    )
    return os.getpid(), sys.executable, _torch_stamp(), variables


def _torch_stamp() -> tuple[object, ...]:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ()
    with contextlib.suppress(OSError):
        return spec.origin, Path(spec.origin).stat().st_mtime_ns
    return (spec.origin,)


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, **dict.fromkeys(_THREADS, "1")}


def _boot_code(fd: int) -> str:
    # After the interpreter's own: a file beside the notebook must not shadow a module of Python's.
    path = [entry for entry in sys.path if os.path.isabs(entry)]
    path.append(str(Path(__file__).parents[3]))
    return _BOOT.format(path=path, fd=fd, kernel=os.getpid())
