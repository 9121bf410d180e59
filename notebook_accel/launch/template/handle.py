"""The template: a clean process with torch already imported, from which agents are forked.

An agent is the process that supervises a run's ranks on one machine. The template is started by
exec in its own session, imports torch, and then only forks: it has no thread, no device, no OpenMP
region, no module of the user's. So a fork of it is safe, whatever the notebook's kernel has done,
and takes milliseconds. This file is the kernel's side, ``process.py`` the template's::

    Template: exec, an end of a socket ------>  serve: imports torch
              wait_until_ready <---------------  TemplateReady
              ForkAgent, an end of a socket -->  fork --> the agent, which gets the socket
              <------------------- Forked(pid)
              CountDevices ------------------->  fork --> a child that asks torch, and ends
              <------------------------ Devices
    follow:   Import ------------------------->  imports in a prepared template
              AskImports --------------------->
              <------------------------ Imports
              exit_of <------- AgentExited(pid)  an agent ended
              close: end of file ------------->  ends once its agents have

Each request has a deadline. A template that does not answer in time, or whose answer is invalid, is
killed, and a new template is asked (:func:`ask_template`); agents of the killed template live on.
There is one template at a time: a launch whose environment needs another template closes the
current one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar
from uuid import uuid4

import psutil

from notebook_accel import wire
from notebook_accel.config.checks import parse_flag
from notebook_accel.errors import LaunchError
from notebook_accel.launch.template.process import ITS_THREADS
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.private.of_libraries import without_debugger
from notebook_accel.system import processes
from notebook_accel.system.interrupts import held
from notebook_accel.system.limits import naming_what_is_short
from notebook_accel.system.modules import import_path
from notebook_accel.system.processes import is_readable, kept_environment, python_code
from notebook_accel.tpu import AUTOLOAD

T = TypeVar("T")

# Read when a process begins, or loads what the template preloads: a change needs a new template.
_READ_AT_IMPORT = (
    *("LD_", "GLIBC_", "MALLOC_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NPY_"),
    *("PYTHON", "PYTORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_", "TQDM_", "TRITON_"),
)
_NEEDS_NO_OTHER = (
    # Set by imports and calls of torch._inductor, scikit-learn, Lightning and Accelerate: what the
    # notebook imports asks for no other template.
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_LIBDEVICE_PATH", "TRITON_PTXAS_PATH"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    "PYTORCH_ENABLE_MPS_FALLBACK",
    # A template loads no backends: ranks do, and read it then. The other is read at each use.
    *(AUTOLOAD, "TORCH_HOME"),
)
# It imports torch, from a cold disk.
_START_SECONDS = 120.0
# What takes milliseconds, on a machine that swaps.
_FORK_SECONDS = 20.0
# The process gives a driver 60 s to name its devices.
_DEVICES_SECONDS = 70.0
# How often it is looked at whether a process that owes an answer is still there.
_LOOK_SECONDS = 0.25
# SIGKILL takes milliseconds; a process in the middle of a read from a slow disk, longer.
_KILLED_SECONDS = 5.0
# Characters of its standard error in a message.
_MAX_ERROR_OUTPUT = 2_000
# Between two looks at whether another thread is done with the template.
_POLL_SECONDS = 0.01

_BOOT = "from notebook_accel.launch.template.process import serve; serve({fd}, {kernel})"


class UnresponsiveTemplateError(LaunchError):
    """Raised if the template ended, did not answer in time, or sent nonsense; it is no more."""


class Template:
    """The kernel's handle of a template process. Safe to use from several threads."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the template process, without waiting until it has imported its modules."""
        self.key = _key(environment)
        self._lock = threading.Lock()
        self._exits: dict[int, wire.AgentExited] = {}
        self._devices: dict[tuple[tuple[str, str], ...], wire.Devices] = {}
        with naming_what_is_short(), without_debugger(), contextlib.ExitStack() as undo:
            ours, theirs = map(undo.enter_context, socket.socketpair())
            self._stderr = undo.enter_context(tempfile.TemporaryFile())
            # Closed when the kernel ends, which ends a template that is not at our code yet.
            stdin, alive = os.pipe()
            undo.callback(os.close, stdin)
            self._alive = undo.enter_context(open(alive, "wb"))
            self._process = subprocess.Popen(
                python_code(_BOOT.format(fd=theirs.fileno(), kernel=os.getpid())),
                env={**environment, **dict.fromkeys(ITS_THREADS, "1"), AUTOLOAD: "0"},
                cwd="/",
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            processes.end_on_hangup(stdin, self._process.pid)
            undo.pop_all()
        theirs.close()
        os.close(stdin)
        self._channel = Channel(ours)
        self._is_ready = False
        self._unsent: deque[wire.Import] = deque()
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return not self._channel.closed and self._process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether the process has finished its imports, so that a launch need not wait for it."""
        # It speaks first, once all is imported.
        return self._is_ready or is_readable(self._channel)

    def wait_until_ready(self) -> None:
        """Wait until the process has imported all that it preloads."""
        with self._lock:
            if not self._is_ready:
                self._receive(wire.TemplateReady, "", _START_SECONDS)

    def import_soon(self, message: wire.Import) -> None:
        """Have the process import what the notebook has imported; return at once."""
        self._unsent.append(message)
        # Whoever asks it something now sends the message with the next question.
        if self._lock.acquire(blocking=False):
            try:
                # A process that has ended is noticed by whoever asks it something.
                with held(), contextlib.suppress(OSError):
                    self._post_imports()
                    self._channel.flush(block=False)
            finally:
                self._lock.release()

    def imports(self) -> wire.Imports:
        """Return how far the imports are."""
        request = wire.AskImports(run=uuid4().hex)
        return self._ask(request, wire.Imports, seconds=_FORK_SECONDS)

    def fork_agent(
        self, sock: socket.socket, *, run: str, is_prepared: bool = False, is_remote: bool = False
    ) -> int:
        """Have the template fork an agent; return the agent's pid.

        Args:
            sock: the agent's end of a socket pair, which is sent to the agent; the caller may close
                its own copy once this returns.

        Raises:
            UnresponsiveTemplateError: it did not answer in time, and was killed.
        """
        request = wire.ForkAgent(run=run, is_prepared=is_prepared, is_remote=is_remote)
        answer = self._ask(request, wire.Forked, seconds=_FORK_SECONDS, fds=(sock.fileno(),))
        if answer.error:
            raise LaunchError(
                f"no process could be forked for the run: {answer.error}. "
                "Free memory or processes on this machine, or end other runs, then launch again."
            )
        return answer.pid

    def count_devices(self, environment: Mapping[str, str]) -> wire.Devices:
        """Return the accelerators that a process with this environment sees.

        The answer is cached. It holds for all environments in which the variables whose names
        contain VISIBLE (such as CUDA_VISIBLE_DEVICES) are the same.

        Raises:
            UnresponsiveTemplateError: it did not answer in time, and was killed.
        """
        chosen = tuple(sorted(item for item in environment.items() if "VISIBLE" in item[0]))
        if chosen not in self._devices:
            request = wire.CountDevices(run=uuid4().hex, environment=dict(environment))
            answer = self._ask(request, wire.Devices, seconds=_DEVICES_SECONDS)
            if answer.error:
                raise LaunchError(
                    "the accelerators of this machine could not be counted. Launch again, or "
                    f"take devices='cpu' to train without them. What happened: {answer.error}"
                )
            self._devices[chosen] = answer
        return self._devices[chosen]

    def exit_of(self, pid: int, *, timeout: float) -> wire.AgentExited | None:
        """Return the template's report that an agent has ended, with the agent's exit code.

        None if no report arrives within ``timeout`` seconds, or if the template itself is gone.
        """
        deadline = time.monotonic() + timeout
        while True:
            # Whoever holds the lock may wait for another answer, and notes the exits meanwhile.
            if self._lock.acquire(timeout=_POLL_SECONDS):
                try:
                    for message, _ in self._channel.drain():
                        self._note(message)
                except (EOFError, OSError, ProtocolError):
                    deadline = 0.0
                finally:
                    self._lock.release()
            # Only after a look: an answer may already lie here unread, also with a timeout of 0.
            if pid in self._exits or time.monotonic() >= deadline:
                return self._exits.get(pid)
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Close the connection; the template process ends by itself once its agents have ended."""
        # One that still imports would notice it late, and has no agents.
        if not self._is_ready:
            self._process.kill()
        self._stderr.close()
        self._alive.close()
        self._channel.close()

    def _post_imports(self) -> None:
        while self._unsent:
            self._channel.post(self._unsent.popleft())

    def _ask(
        self,
        request: wire.Message,
        answer: type[wire.M],
        *,
        seconds: float,
        fds: tuple[int, ...] = (),
    ) -> wire.M:
        self.wait_until_ready()
        with self._lock:
            # An OSError here says that this process has no descriptor left to send, and nothing of
            # the template.
            with held():
                self._post_imports()
                self._channel.post(request, fds)
            return self._receive(answer, request.run, seconds)

    def _receive(self, answer: type[wire.M], run: str, seconds: float) -> wire.M:
        deadline = time.monotonic() + seconds
        found: wire.M | None = None
        try:
            while found is None:
                # The wait may be interrupted. Reading may not, so that no message is torn.
                wants_to_write = self._channel.num_pending > 0
                if not is_readable(self._channel, _LOOK_SECONDS, or_writable=wants_to_write):
                    # Its end of the connection may live on in a process that it forked.
                    if not self.alive:
                        raise EOFError("the process has ended")
                    if time.monotonic() >= deadline:
                        raise self._lost("did not answer in time")
                with held():
                    self._channel.flush(block=False)
                    for message, _ in self._channel.drain():
                        # An interrupted call may have left its answer behind.
                        if isinstance(message, answer) and message.run == run:
                            found = message
                        self._note(message)
        except (EOFError, OSError, ValueError, ProtocolError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            code = self._process.returncode
            unclear = f"could not be understood ({error})"
            raise self._lost(unclear if code is None else processes.describe_exit(code)) from error
        return found

    def _note(self, message: wire.Message) -> None:
        if isinstance(message, wire.TemplateReady):
            if message.version != wire.VERSION:
                self._end()
                raise LaunchError(
                    "the helper process from which ranks are started has another version of "
                    "notebook_accel, which was installed meanwhile: restart the kernel"
                )
            self._is_ready = True
        elif isinstance(message, wire.AgentExited):
            self._exits[message.pid] = message
        elif isinstance(message, wire.Forked):
            # The new agent may have the pid of one that ended long ago.
            self._exits.pop(message.pid, None)

    def _lost(self, how: str) -> UnresponsiveTemplateError:
        """Kill the template process but not its agents; return the error to raise."""
        wrote = self.error_output[-_MAX_ERROR_OUTPUT:]
        error = UnresponsiveTemplateError(
            f"the helper process from which ranks are started (pid {self.pid}) {how}. "
            "Launch again: a new one is made. If it happens again, look for what stops processes "
            "on this machine (a job scheduler, a debugger, a full memory limit), and whether "
            f"`{sys.executable} -c 'import torch._dynamo'` works in a terminal."
            f"{wrote and f' It wrote:{chr(10)}{wrote}'}"
        )
        self._end()
        return error

    def _end(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_SECONDS)
        self.close()

    @property
    def error_output(self) -> str:
        """All that the template and its children wrote to standard error; "" after :meth:`close`.

        Mostly tracebacks.
        """
        if self._stderr.closed:
            return ""
        # Not by seek and read, which would move the place where the processes write.
        fd = self._stderr.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace").strip()


_current: Template | None = None
# Held by whoever asks it: another launch, whose variables need a new one, must not close it.
_asking = threading.RLock()
# What each template of this kernel is to import.
_followed: list[wire.Import] = []
_following = threading.Lock()
# Set where launches will probably come: in a notebook.
_is_warm = False


def template(environment: Mapping[str, str] | None = None) -> Template:
    """Return the template for launches with this environment; start one if none fits.

    A template fits if it runs and was started with the same values of all variables that Python,
    torch and the C libraries read at import, except the numbers of threads. A template that does
    not fit is closed.
    """
    global _current
    environment = os.environ if environment is None else environment
    with _asking, held():
        if _current is None or _current.key != _key(environment) or not _current.alive:
            close()
            _current = Template(environment)
            with _following:
                for message in _followed:
                    _current.import_soon(message)
            atexit.unregister(close)
            atexit.register(close)
        return _current


def ask_template(environment: Mapping[str, str], question: Callable[[Template], T]) -> T:
    """Return ``question(template)`` for the template of this environment.

    If the template ends or does not answer in time, ``question`` is called once more, with a new
    one. No other thread can close the template until this returns.

    Raises:
        UnresponsiveTemplateError: the second template did not answer either.
    """
    with _asking:
        try:
            return question(template(environment))
        except UnresponsiveTemplateError:
            return question(template(environment))


def close() -> None:
    """Close the current template, if any: its process ends once its agents have ended."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def warm() -> None:
    """Start the template in the background, so that the first launch need not wait for imports.

    Returns at once. If the system cannot start it, nothing is raised here: the launch itself will
    fail and say why. With ``NOTEBOOK_ACCEL_WARM=0`` in the environment this does nothing.
    """
    # Not at a lower priority (nice), though nobody waits for it: a process without privileges can
    # not raise it again, and the ranks inherit it.
    global _is_warm
    _is_warm = parse_flag("NOTEBOOK_ACCEL_WARM", os.environ.get("NOTEBOOK_ACCEL_WARM") or "1")
    if _is_warm:
        with contextlib.suppress(LaunchError):
            template()


def follow(items: Iterable[wire.ImportItem]) -> None:
    """Have this and all later templates import what the notebook or its ranks have imported.

    Returns at once. Nothing is imported twice. Without :func:`warm`, this does nothing: a script
    has one launch or few, and a template that waits for more would hold memory for nothing.
    """
    with _following:
        known = {item for message in _followed for item in message.items}
        new = tuple(dict.fromkeys(item for item in items if item not in known))
        if not new or not _is_warm:
            return
        message = wire.Import(items=new, environment=kept_environment(), path=tuple(import_path()))
        _followed.append(message)
        if _current is not None and _current.alive:
            _current.import_soon(message)


def followed() -> tuple[wire.ImportItem, ...]:
    """Return what templates of this process import, for those of other processes."""
    with _following:
        return tuple(item for message in _followed for item in message.items)


def imports_line() -> str:
    """Return which libraries are imported for all ranks, and which are not; "" if there is none."""
    with _asking:
        if _current is None or not _current.alive or not _current.is_ready:
            return ""
        source, state = _current, _current.imports()
    parts = []
    if state.libraries:
        with contextlib.suppress(psutil.Error):
            pids = state.pid, source.pid
            prepared, clean = (psutil.Process(pid).memory_info().rss for pid in pids)
            size = max(0, prepared - clean) / 1024**2
            names = ", ".join(state.libraries)
            parts.append(f"{names}: imported once for all ranks, which share {size:,.0f} MB")
    if state.importing:
        parts.append(f"{state.importing} is being imported")
    parts += [f"{name} is imported by each rank ({why})" for name, why in state.left_out.items()]
    if state.problem:
        parts.append(f"the libraries of the notebook are imported by each rank: {state.problem}")
    return "; ".join(parts)


def _key(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return a key that is equal for launches which can use the same template."""
    variables = tuple(
        sorted(
            (name, value)
            for name, value in environment.items()
            if name.startswith(_READ_AT_IMPORT) and name not in (*ITS_THREADS, *_NEEDS_NO_OTHER)
        )
    )
    return os.getpid(), sys.executable, variables
