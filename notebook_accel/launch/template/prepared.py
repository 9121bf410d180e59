"""The prepared template: a fork of the clean one that has imported the notebook's libraries.

Ranks that are forked from it import nothing again, and share its memory. The kernel tells the clean
template what cells and earlier ranks have imported; the clean one brings prepared ones about::

    clean template, Preparer               prepared template, _Server
    fork --------------------------------->
    Import ------------------------------->  imports the items one after the other
          <----------- Importing(number) --  before each and after the last; and after one that
                                             must not be there
    ForkAgent ---------------------------->  forks the agent

What does not survive a fork is left out: after each import the process looks for threads, sockets,
devices and child processes. An item that left any, or that ended the process or took longer than a
minute, is noted; the process is killed, and a new one imports the others: ranks import that item
themselves. So does a new one where a file that was imported has changed.

Prepared templates and agents are children of the clean template, which reaps them: an agent that
was forked by the prepared one is adopted.
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
from itertools import takewhile
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
        num_sent: how many of the wanted items it was told to import, and ``num_done``, how many of
            them it has behind it.
    """

    pid: int
    exit_fd: int
    channel: Channel
    num_sent: int = 0
    num_done: int = 0
    files: dict[str, int] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        return self.num_done < self.num_sent


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
        self._now: _Prepared | None = None
        # Of all that have not been reaped.
        self.pids: set[int] = set()

    def want(self, message: wire.Import) -> None:
        """Import the items of a message, unless the clean template or an earlier message has."""
        for item in message.items:
            if item not in self._known and not _is_here(item):
                self._known.add(item)
                self._wanted.append((item, message))
        self._go_on()

    def state(self) -> wire.Imports:
        """Return how far the imports are; drop what was imported from files that have changed."""
        if self._now is not None and _have_changed(self._now.files):
            self._drop(self._now)
            self._go_on()
        now, num_done = self._now, self._now.num_done if self._now else 0
        return wire.Imports(
            pid=now.pid if now else 0,
            importing=self._wanted[num_done][0].root if now and now.is_busy else "",
            libraries=tuple(dict.fromkeys(item.root for item, _ in self._wanted[:num_done])),
            left_out=self._left_out,
            problem=self._problem,
        )

    def fork_agent(self, message: wire.ForkAgent, fd: int) -> int:
        """Return the pid of a new agent that has the libraries; 0 if none can be had."""
        now = self._now
        if now is None or now.is_busy:
            return 0
        with suppress(OSError, EOFError, ProtocolError):
            now.channel.send(message, (fd,))
            if processes.is_readable(now.channel, _FORK_SECONDS):
                answer, _ = now.channel.receive()
                assert isinstance(answer, wire.Forked)
                if answer.pid:
                    return answer.pid
        self._drop(now)
        return 0

    def end(self) -> None:
        self._wanted.clear()
        if self._now is not None:
            self._drop(self._now)

    def _go_on(self) -> None:
        """Have more imported, if there is more and nothing is being imported."""
        start = self._now.num_sent if self._now else 0
        if start == len(self._wanted) or (self._now is not None and self._now.is_busy):
            return
        free = free_memory()
        self._problem = ""
        if free < _LITTLE_MEMORY:
            self._problem = f"only {free / (1 << 30):.1f} GB of memory are free"
            return
        now = self._now = self._now or self._fork()
        if now is None:
            return
        message = self._wanted[start][1]
        same = takewhile(lambda pair: pair[1] is message, self._wanted[start:])
        items = tuple(item for item, _ in same)
        now.num_sent = start + len(items)
        with suppress(OSError):  # it is dead: noticed by its descriptor
            now.channel.send(msgspec.structs.replace(message, items=items, first=start))

    def _fork(self) -> _Prepared | None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                fds = [*self._own(), ours.fileno()]
                pid = fork(partial(_serve, Channel(theirs), self._kernel, os.getpid(), fds))
                exit_fd = processes.watch_exit(pid)
            except OSError as error:
                ours.close()
                self._problem = f"no process could be forked for them: {error}"
                return None
        made = _Prepared(pid=pid, exit_fd=exit_fd, channel=Channel(ours))
        self.pids.add(pid)
        self._selector.register(made.channel, 1, partial(self._listen, made))
        self._selector.register(exit_fd, 1, partial(self._reap, made))
        return made

    def _listen(self, made: _Prepared) -> None:
        try:
            messages = made.channel.drain()
        except (OSError, EOFError, ProtocolError):
            self._lose(made)
            return
        for message, _ in messages:
            if made is self._now and isinstance(message, wire.Importing):
                self._hear(made, message)

    def _hear(self, made: _Prepared, message: wire.Importing) -> None:
        made.num_done = message.number
        made.files.update(message.files)
        if message.problem:
            self._leave_out(made, message.problem)
        elif message.error:
            self._left_out[self._wanted[message.number][0].module] = message.error
        self._go_on()

    def _lose(self, made: _Prepared) -> None:
        if made.is_busy:
            limit = f"{_IMPORT_SECONDS:.0f} s"
            self._leave_out(made, f"its import ended the process, or took longer than {limit}")
        else:
            self._drop(made)

    def _leave_out(self, made: _Prepared, why: str) -> None:
        item, _ = self._wanted.pop(made.num_done)
        root = item.root
        # Once two of a library's modules are at fault, likely all are: each import of one is an
        # import of the whole library, and what it imports.
        if item.module == root or any(name.partition(".")[0] == root for name in self._left_out):
            later = [pair for pair in self._wanted[made.num_done :] if pair[0].root != root]
            self._wanted[made.num_done :] = later
            item = wire.ImportItem(root)
        self._left_out[item.module] = why
        self._drop(made)
        self._go_on()

    def _drop(self, made: _Prepared) -> None:
        self._now = None
        self._selector.unregister(made.channel)
        made.channel.close()
        with suppress(ProcessLookupError):
            os.kill(made.pid, signal.SIGKILL)

    def _reap(self, made: _Prepared) -> None:
        """Reap one that has ended: it was dropped, or what it imported has ended it."""
        if made is self._now:
            self._listen(made)  # to the last that it said
        if made is self._now:
            self._lose(made)
        self._selector.unregister(made.exit_fd)
        os.close(made.exit_fd)
        reap(made.pid)
        self.pids.discard(made.pid)
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
        processes.die_with_parent(self._template)
        while True:
            message, fds = self._channel.receive()
            if isinstance(message, wire.Import):
                self._import(message)
            elif isinstance(message, wire.ForkAgent):
                self._fork_agent(message, fds[0])

    def _fork_agent(self, message: wire.ForkAgent, fd: int) -> None:
        # Without room for a process, this one ends, and the clean template says so.
        pid, middle = fork_orphan(partial(self._be_agent, message, fd))
        os.close(fd)
        self._channel.send(wire.Forked(pid=pid))
        os.waitpid(middle, 0)

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
        number = message.first
        for number, item in enumerate(message.items, message.first):
            if not _is_here(item):
                self._channel.send(wire.Importing(number=number))
                # It ends the process, whatever hangs.
                signal.setitimer(signal.ITIMER_REAL, _IMPORT_SECONDS)
                error = _import_item(item)
                signal.setitimer(signal.ITIMER_REAL, 0)
                problem = self._what_it_left()
                if problem or error:
                    said = wire.Importing(number=number, problem=problem, error=error)
                    self._channel.send(said)
        gc.enable()
        # Not collected before: that takes 0.3 s, and frees little.
        gc.freeze()
        self._channel.send(wire.Importing(number=number + 1, files=self._files))
        self._files = {}

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
