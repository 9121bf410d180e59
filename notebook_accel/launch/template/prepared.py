"""The prepared template: a fork of the clean one that has imported the notebook's libraries.

Ranks that are forked from it import nothing again, and share its memory. The kernel tells the clean
template what cells and earlier ranks have imported; the clean one brings prepared ones about::

    clean template, Preparer                 prepared template, serve
    fork, or ForkTemplate to the ready one ->  (called the trial: nothing is lost if it dies)
    Import, AskImports --------------------->  imports the items one after the other
          <------------- Importing(number) --  before each; and after it if it must not be there
          <----------- TemplateReady(files) -  the trial takes the place of the ready one
    ForkAgent ------------------------------>  forks the agent

What does not survive a fork is left out: after each import the trial looks for threads, sockets,
devices and child processes. An item that left any, or that ended the trial or took longer than a
minute, is noted, and a new trial goes on without it: ranks import it themselves.

All prepared templates and agents are children of the clean template, which reaps them: one that was
forked by a prepared template is adopted. A prepared template is killed once another one has taken
its place, or once a file that it imported has changed.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, invalidate_caches
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from notebook_accel.launch import wire
from notebook_accel.launch.system import processes
from notebook_accel.launch.system.memory import free_memory
from notebook_accel.launch.template.forking import fork, fork_orphan, run_agent
from notebook_accel.launch.template.libraries import file_of, is_library_file
from notebook_accel.launch.transport.channel import Channel, ProtocolError

if TYPE_CHECKING:
    import selectors
    from collections.abc import Callable, Mapping, Sequence

# The number of threads is set in each rank; a template itself must never start one.
ITS_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# With it, torch counts GPUs without the driver's context, of which no fork could make another.
_SAFE_COUNT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# NVML has the last two open, a driver's context more than them.
_HARMLESS_DEVICE = re.compile(r"/dev/(null|zero|full|u?random|tty|shm/|pts/|nvidiactl|nvidia\d+$)")
_IMPORT_SECONDS = 60.0
_FORK_SECONDS = 20.0
_ADOPTION_SECONDS = 5.0
_POLL_SECONDS = 0.001
# That of jemalloc, which pyarrow brings, and so datasets and pandas: the child starts it again.
_SURVIVING_THREADS = ("jemalloc_bg_thd",)
# A thread that an import starts may end by itself.
_THREAD_SECONDS = 0.2
_MAX_ERROR = 200
# The prepared template of a notebook with transformers, pandas and sklearn holds 0.5 GB.
_LITTLE_MEMORY = 1 << 30


# ---- in the clean template -----------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class _Prepared:
    """A prepared template.

    Attributes:
        deadline: time in monotonic seconds by which it must have said more.
    """

    pid: int
    exit_fd: int
    channel: Channel
    num_items: int
    current: int = 0
    deadline: float = float("inf")
    files: Mapping[str, int] = field(default_factory=dict)


class Preparer:
    """Keeps the prepared template of a clean one, in whose process it runs."""

    def __init__(
        self,
        kernel: int,
        selector: selectors.BaseSelector,
        own: Callable[[], list[int]],
        on_end: Callable[[], object],
    ) -> None:
        """Make one that has nothing to import yet.

        Args:
            own: returns the descriptors that a child of the clean template must close.
        """
        self._kernel = kernel
        self._selector = selector
        self._own = own
        self._on_end = on_end
        self._wanted: list[tuple[wire.ImportItem, wire.Import]] = []
        self._known: set[wire.ImportItem] = set()
        self._left_out: dict[str, str] = {}
        self._problem = ""
        self._ready: _Prepared | None = None
        self._trial: _Prepared | None = None
        self._ending: set[int] = set()

    @property
    def pids(self) -> set[int]:
        """Of all prepared templates that have not been reaped."""
        return self._ending | {each.pid for each in self._living()}

    def descriptors(self) -> list[int]:
        """Return the descriptors that a child of the clean template must close."""
        return [fd for each in self._living() for fd in (each.channel.fileno(), each.exit_fd)]

    def _living(self) -> list[_Prepared]:
        return [each for each in (self._ready, self._trial) if each is not None]

    def want(self, message: wire.Import) -> None:
        """Import the items of a message, unless the clean template or an earlier message has."""
        for item in message.items:
            if item not in self._known and not _is_here(item):
                self._known.add(item)
                self._wanted.append((item, message))
        self._go_on()

    def state(self) -> wire.Imports:
        """Return how far the imports are; drop what was imported from files that have changed."""
        ready = self._ready
        if ready is not None and _have_changed(ready.files):
            self._drop(ready)
            self._go_on()
        have, trial = self._num_ready(), self._trial
        is_awaited = any(message.is_awaited for _, message in self._wanted[have:])
        return wire.Imports(
            pid=self._ready.pid if self._ready else 0,
            importing=self._wanted[trial.current][0].root if trial and is_awaited else "",
            libraries=tuple(dict.fromkeys(item.root for item, _ in self._wanted[:have])),
            left_out=self._left_out,
            problem=self._problem,
        )

    def fork_agent(self, message: wire.ForkAgent, fd: int) -> int:
        """Return the pid of a new agent that has the libraries; 0 if none can be had."""
        return self._ask_fork(self._ready, message, fd) if self._ready else 0

    def seconds_left(self) -> float | None:
        """Return how long the event loop may wait, at most, until it calls :meth:`check`."""
        return None if self._trial is None else max(0.0, self._trial.deadline - time.monotonic())

    def check(self) -> None:
        """End a trial whose import takes too long."""
        if self._trial is not None and time.monotonic() >= self._trial.deadline:
            self._leave_out(self._trial, f"its import took longer than {_IMPORT_SECONDS:.0f} s")

    def end(self) -> None:
        self._wanted.clear()
        for each in self._living():
            self._drop(each)

    def _num_ready(self) -> int:
        return self._ready.num_items if self._ready else 0

    def _go_on(self) -> None:
        """Start a trial if there is more to import, and none is under way."""
        if self._trial is not None or self._num_ready() == len(self._wanted):
            return
        free = free_memory()
        self._problem = ""
        if free < _LITTLE_MEMORY:
            self._problem = f"only {free / (1 << 30):.1f} GB of memory are free"
            return
        trial = self._trial = self._fork(len(self._wanted))
        if trial is None:
            return
        start = self._num_ready()  # none, if the ready one could not fork it
        trial.current, trial.deadline = start, time.monotonic() + _IMPORT_SECONDS
        with suppress(OSError):  # it is dead: noticed by its descriptor
            for message, pairs in groupby(self._wanted[start:], key=lambda pair: pair[1]):
                items = tuple(item for item, _ in pairs)
                trial.channel.send(msgspec.structs.replace(message, items=items, first=start))
                start += len(items)
            trial.channel.send(wire.AskImports())

    def _fork(self, num_items: int) -> _Prepared | None:
        """Fork a prepared template from the ready one, or else from this process."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = 0
                if self._ready is not None:
                    pid = self._ask_fork(self._ready, wire.ForkTemplate(), theirs.fileno())
                if not pid:
                    fds = [*self._own(), ours.fileno()]
                    pid = fork(partial(_serve, Channel(theirs), self._kernel, os.getpid(), fds))
                exit_fd = processes.watch_exit(pid)
            except OSError as error:
                ours.close()
                self._problem = f"no process could be forked for them: {error}"
                return None
        made = _Prepared(pid=pid, exit_fd=exit_fd, channel=Channel(ours), num_items=num_items)
        self._selector.register(made.channel.fileno(), 1, partial(self._listen, made))
        self._selector.register(exit_fd, 1, partial(self._reap, made))
        return made

    def _ask_fork(self, ready: _Prepared, request: wire.Message, fd: int) -> int:
        """Have the ready one fork; return the new pid, or 0 and kill it if it cannot."""
        try:
            ready.channel.send(request, (fd,))
            if processes.is_readable(ready.channel, _FORK_SECONDS):
                answer, _ = ready.channel.receive()
                assert isinstance(answer, wire.Forked)
                if not answer.error:
                    return answer.pid
        except (OSError, EOFError, ProtocolError):
            pass
        self._drop(ready)
        return 0

    def _listen(self, made: _Prepared) -> None:
        try:
            messages = made.channel.drain()
        except (OSError, EOFError, ProtocolError):  # it is dead, and will be reaped
            with suppress(KeyError):
                self._selector.unregister(made.channel.fileno())
            return
        for message, _ in messages:
            if made is self._trial:
                self._hear(made, message)

    def _hear(self, trial: _Prepared, message: wire.Message) -> None:
        trial.deadline = time.monotonic() + _IMPORT_SECONDS
        if isinstance(message, wire.TemplateReady):
            if self._ready is not None:
                self._drop(self._ready)
            trial.files, trial.deadline = message.files, float("inf")
            self._ready, self._trial = trial, None
            self._go_on()
        elif isinstance(message, wire.Importing):
            trial.current = message.number
            if message.problem:
                self._leave_out(trial, message.problem)
            elif message.error:
                self._left_out[self._wanted[message.number][0].module] = message.error

    def _leave_out(self, trial: _Prepared, why: str) -> None:
        item, _ = self._wanted.pop(trial.current)
        root = item.root
        # Once two of a library's modules are at fault, likely all are: each import of one is an
        # import of the whole library, and what it imports.
        if item.module == root or any(name.partition(".")[0] == root for name in self._left_out):
            ready = self._num_ready()
            later = [pair for pair in self._wanted[ready:] if pair[0].root != root]
            self._wanted[ready:] = later
            item = wire.ImportItem(root)
        self._left_out[item.module] = why
        self._drop(trial)
        self._go_on()

    def _drop(self, made: _Prepared) -> None:
        self._forget(made)
        with suppress(ProcessLookupError):
            os.kill(made.pid, signal.SIGKILL)
        self._selector.register(made.exit_fd, 1, partial(self._reap, made))

    def _forget(self, made: _Prepared) -> None:
        self._ready = None if made is self._ready else self._ready
        self._trial = None if made is self._trial else self._trial
        self._ending.add(made.pid)
        for fd in (made.channel.fileno(), made.exit_fd):
            with suppress(KeyError, ValueError):
                self._selector.unregister(fd)
        made.channel.close()

    def _reap(self, made: _Prepared) -> None:
        """Reap one that has ended: it was dropped, or what it imported has ended it."""
        if made is self._trial:
            self._listen(made)  # to the last that it said
        if made is self._trial:
            self._leave_out(made, "its import ended the process")
            return
        self._forget(made)
        os.close(made.exit_fd)
        reap(made.pid)
        self._ending.discard(made.pid)
        self._on_end()
        self._go_on()


def reap(pid: int) -> int:
    """Reap a child that has ended, be it not adopted yet; return its status."""
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while True:
        try:
            return os.waitpid(pid, 0)[1]
        except ChildProcessError:
            # The process between, which forks and ends, is not quite gone.
            if time.monotonic() >= deadline:
                raise
            time.sleep(_POLL_SECONDS)


def _have_changed(files: Mapping[str, int]) -> bool:
    with suppress(OSError):
        return any(os.stat(path).st_mtime_ns != changed for path, changed in files.items())
    return True  # one is gone


def _is_here(item: wire.ImportItem) -> bool:
    # Not by hasattr: some modules import more for a name that they lack.
    names = vars(sys.modules[item.module]) if item.module in sys.modules else None
    return names is not None and all(name in names for name in item.names)


# ---- in a prepared template ----------------------------------------------------------------


class _Server:
    """A prepared template's own side."""

    def __init__(self, channel: Channel, kernel: int, template: int) -> None:
        self._channel = channel
        self._kernel = kernel
        self._template = template
        # What is imported prints into nothing; an agent, forked later, says by this what ended it.
        self._stderr = os.dup(2)
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        self._seen = set(sys.modules)
        self._files: dict[str, int] = {}

    def run(self) -> None:
        self._await_adoption()
        processes.die_with_parent(self._template)
        while True:
            message, fds = self._channel.receive()
            if isinstance(message, wire.Import):
                self._import(message)
            elif isinstance(message, wire.AskImports):
                # Not collected before: that takes 0.3 s, and frees little.
                gc.freeze()
                self._channel.send(wire.TemplateReady(files=self._files))
            elif isinstance(message, wire.ForkTemplate):
                self._fork(self._serve_there, fds[0])
            elif isinstance(message, wire.ForkAgent):
                self._fork(partial(self._be_agent, message), fds[0])

    def _await_adoption(self) -> None:
        deadline = time.monotonic() + _ADOPTION_SECONDS
        while os.getppid() != self._template and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _fork(self, act: Callable[[int], None], fd: int) -> None:
        try:
            pid, middle = fork_orphan(partial(act, fd))
        except OSError as error:
            self._channel.send(wire.Forked(error=str(error)))
        else:
            self._channel.send(wire.Forked(pid=pid))
            os.waitpid(middle, 0)
        finally:
            os.close(fd)

    def _serve_there(self, fd: int) -> None:
        self._channel.close()
        self._channel = Channel(socket.socket(fileno=fd))
        self.run()

    def _be_agent(self, message: wire.ForkAgent, fd: int) -> None:
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        self._channel.close()
        run_agent(message, fd, self._kernel)

    def _import(self, message: wire.Import) -> None:
        os.environ.clear()
        os.environ.update(message.environment, **dict.fromkeys(ITS_THREADS, "1"), **_SAFE_COUNT)
        sys.path[:] = message.path
        with suppress(OSError):
            os.chdir(message.directory)
        invalidate_caches()  # packages may have been installed meanwhile
        gc.disable()
        for number, item in enumerate(message.items, message.first):
            if not _is_here(item):
                self._channel.send(wire.Importing(number=number))
                error = _import_item(item)
                problem = self._what_it_left()
                if problem or error:
                    said = wire.Importing(number=number, problem=problem, error=error)
                    self._channel.send(said)
        gc.enable()

    def _what_it_left(self) -> str:
        """Return why ranks must not be forked from this process any more; "" if they may."""
        for name in sys.modules.keys() - self._seen:
            self._seen.add(name)
            path = file_of(sys.modules.get(name))
            if path and not is_library_file(path):
                return f"it imports {path}, which may be edited"
            with suppress(OSError):
                if path:
                    self._files[path] = os.stat(path).st_mtime_ns
        deadline = time.monotonic() + _THREAD_SECONDS
        while found := _left_behind({self._channel.fileno()}):
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        return found


def _import_item(item: wire.ImportItem) -> str:
    """Import an item; return the exception that this raised, or ""."""
    try:
        module = import_module(item.module)
        for name in item.names:
            if not hasattr(module, name):
                import_module(f"{item.module}.{name}")
    except BaseException as error:  # of the library; the kernel may be more lucky
        return f"{type(error).__name__}: {error}"[:_MAX_ERROR]
    return ""


def _native_threads() -> list[str]:
    """Return the names of threads of native code, but for those that a fork makes anew."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            names += Path("/proc/self/task", task, "comm").read_text().splitlines()
    names.remove(Path("/proc/self/comm").read_text().strip())
    return [f"{name}, of native code" for name in names if name not in _SURVIVING_THREADS]


def _left_behind(own: set[int]) -> str:
    """Return what this process has that does not survive a fork."""
    if names := [each.name for each in threading.enumerate()[1:]] or _native_threads():
        return f"it starts a thread ({names[0]})"
    if processes.has_children():
        return "it starts a process"
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - own:
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:"):
                return "it opens a socket"
            if target.startswith("/dev/") and not _HARMLESS_DEVICE.match(target):
                return f"it uses {target}"
    return ""


def _serve(channel: Channel, kernel: int, template: int, unneeded: Sequence[int]) -> None:
    for fd in unneeded:
        os.close(fd)
    _Server(channel, kernel, template).run()
