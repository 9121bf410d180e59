"""The template's own process: it imports torch once, then forks agents until the kernel ends.

The kernel is the notebook's process; an agent supervises a run's ranks on this machine.

    serve: import torch                                       -> TemplateReady
    Server: ForkAgent    -> fork: agent.main, in a session of its own -> Forked
             CountDevices -> fork: ask torch, end                      -> Devices
             an agent ends -> kill its descendants, remove its files   -> AgentExited
             end of file   -> no more requests; end with the last agent
             the kernel's process ends -> end everything, at once

Invariants: one thread, no device, no module of the user's, so that each fork is safe. A child that
ends by an exception prints its traceback to the template's standard error, which the kernel reads.

The prepared template is a fork of the clean one that has imported the notebook's libraries. Ranks
that are forked from it import nothing again, and share its memory. The kernel tells the clean
template what cells and earlier ranks have imported; the clean one brings prepared ones about::

    clean template, Preparer               prepared template, _Server
    fork --------------------------------->
    Import ------------------------------->  imports the items one after the other
          <------------- Importing(item) --  before each; and after one that failed, or that must
                                             not be there
          <----------------- Importing() --  after the last
    ForkAgent ---------------------------->  forks the agent,
          <------------------ Forked(pid) -  which says its pid

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
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, invalidate_caches
from pathlib import Path

import msgspec

from notebook_accel import tpu, wire
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.launch.transport.frames import FramedChannel
from notebook_accel.system import limits, processes
from notebook_accel.system.modules import file_of, is_library_file

# torch._dynamo: the first optimizer of a process imports it, 2 s in every rank otherwise. Of the
# standard library, what a bar (multiprocessing.synchronize) and a connection (encodings.idna) need.
_PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.multiprocessing"),
    *("multiprocessing.synchronize", "torch.nn.parallel", "torch.utils.data", "numpy"),
    *("encodings.idna", "cloudpickle", "psutil", "tqdm.auto", "notebook_accel.launch.agent"),
    *("notebook_accel.launch.setup.states", "notebook_accel.launch.worker.bars"),
    *("notebook_accel.training.accelerator", "notebook_accel.training.strategies.ddp"),
)
# A driver that was asleep names its devices within seconds; a broken one never does.
_ANSWER_SECONDS = 60.0
# The number of threads is set in each rank; a template itself must never start one.
ITS_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# With it, torch counts GPUs without the driver's context, of which no fork could make another.
_SAFE_COUNT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# NVML has the last two open, a driver's context more than them.
_HARMLESS_DEVICE = re.compile(r"/dev/(null|zero|full|u?random|tty|shm/|pts/|nvidiactl|nvidia\d+$)")
_IMPORT_SECONDS = 60.0
# Half of what the kernel waits for the clean template, which then still forks the agent itself.
_FORK_SECONDS = 10.0
_ADOPTION_SECONDS = 5.0
_POLL_SECONDS = 0.001
# That of jemalloc, which pyarrow brings, and so datasets and pandas: the child starts it again.
_SURVIVING_THREADS = ("jemalloc_bg_thd",)
# A thread that an import starts may end by itself.
_THREAD_SECONDS = 0.2
_MAX_ERROR = 200
# The prepared template of a notebook with transformers, pandas and sklearn holds 0.5 GB.
_LITTLE_MEMORY = 1 << 30
# What stands around a child's traceback on standard error.
_FAILED, _END = "process {} failed\n", "\n== end of the traceback"


def serve(fd: int, kernel_pid: int) -> None:
    """Run the template process: import torch, then serve the kernel's requests.

    This returns once the kernel has closed the connection and all agents have ended. When the
    kernel's process ends, this kills all agents and exits the process.
    """
    kernel = processes.watch_exit(kernel_pid)
    if os.getppid() != kernel_pid:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.adopt_orphans()
    # Two descriptors for each agent that lives.
    limits.raise_limit()
    # The collector would look through what is imported again and again, which takes a tenth of the
    # time of the imports.
    gc.disable()
    for name in _PRELOADED:
        if processes.is_readable(kernel):  # a child of the kernel has kept end_on_hangup's pipe
            return
        import_module(name)
    tpu.backends()
    # The first such block of a process imports more (torch 2.13): every optimizer's step has one,
    # and it would take each rank some 5 ms.
    with import_module("torch").autograd.profiler.record_function("template"):
        pass
    gc.enable()
    # Not collected before: that takes 0.3 s, in which the first launch may wait.
    gc.freeze()
    # In place of the pipe of end_on_hangup: from now on the server watches the kernel.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    channel = Channel(socket.socket(fileno=fd))
    server = Server(channel, kernel)
    with suppress(OSError):
        channel.send(wire.TemplateReady(version=wire.VERSION))
    server.run()


class Server:
    """The event loop of the template process: answers the kernel's requests, reaps ended agents."""

    def __init__(self, channel: Channel, kernel: int) -> None:
        self._channel = channel
        self.kernel = kernel
        # The run of each, by pid.
        self._agents: dict[int, str] = {}
        self.selector = selectors.DefaultSelector()
        self._is_retired = False
        self._preparer = Preparer(self)
        self.selector.register(self.kernel, selectors.EVENT_READ, self._kernel_gone)
        self.selector.register(self._channel, selectors.EVENT_READ, self._from_kernel)

    def run(self) -> None:
        while self._agents or self._preparer.pids or not self._is_retired:
            for key, _ in self.selector.select():
                # Another one of them may have taken it out meanwhile.
                if self.selector.get_map().get(key.fd) == key:
                    key.data()

    def descriptors(self) -> list[int]:
        """Return the descriptors of this process that a child closes: all but the kernel's."""
        watched = (key.fd for key in self.selector.get_map().values())
        return [self.selector.fileno(), *(fd for fd in watched if fd != self.kernel)]

    def kill_descendants(self) -> list[int]:
        return processes.kill_descendants(keep={*self._agents, *self._preparer.pids})

    def _kernel_gone(self) -> None:
        """Kill all descendants, remove the scratch files of the agents, and exit this process."""
        reaped = processes.kill_descendants()
        for agent, run in self._agents.items():
            processes.remove_scratch(run, agent, used_by=reaped)
        os._exit(0)

    def _from_kernel(self) -> None:
        try:
            messages = self._channel.drain()
        except (EOFError, OSError, ProtocolError):
            # Retired: runs that are under way go on, and their kernel is still watched.
            self.selector.unregister(self._channel)
            self._channel.close()
            self._is_retired = True
            self._preparer.end()
            return
        for message, fds in messages:
            if isinstance(message, wire.ForkAgent):
                self._fork_agent(message, fds)
            elif isinstance(message, wire.CountDevices):
                self._count_devices(message)
            elif isinstance(message, wire.Import):
                self._preparer.want(message)
            elif isinstance(message, wire.AskImports):
                state = self._preparer.state()
                self._tell(msgspec.structs.replace(state, run=message.run))

    def _fork_agent(self, message: wire.ForkAgent, fds: list[int]) -> None:
        def be_agent() -> None:
            for number in self.descriptors():
                os.close(number)
            run_agent(message, fds[0], self.kernel)

        pid = 0
        try:
            prepared = self._preparer.fork_agent(message, fds[0]) if message.is_prepared else 0
            pid = prepared or fork(be_agent)
            exit_fd = processes.watch_exit(pid)
            self.selector.register(exit_fd, selectors.EVENT_READ, partial(self._reap, pid, exit_fd))
            self._agents[pid] = message.run
            answer = wire.Forked(run=message.run, pid=pid)
        except OSError as error:  # no room for one more process, or for a descriptor
            if pid:
                os.kill(pid, signal.SIGKILL)
                reap(pid)
            answer = wire.Forked(run=message.run, error=str(error))
        for fd in fds:
            os.close(fd)
        self._tell(answer)

    def _reap(self, pid: int, exit_fd: int) -> None:
        run = self._agents.pop(pid)
        self.selector.unregister(exit_fd)
        os.close(exit_fd)
        status = reap(pid)
        # What the agent would have ended itself, had it not been killed.
        reaped = self.kill_descendants()
        processes.remove_scratch(run, pid, used_by=reaped)
        self._tell(wire.AgentExited(pid=pid, exitcode=os.waitstatus_to_exitcode(status)))

    def _tell(self, message: wire.Message) -> None:
        with suppress(OSError):
            self._channel.send(message)

    def _count_devices(self, message: wire.CountDevices) -> None:
        """Answer with the accelerators, counted in a forked child process."""
        # Without an answer it is not known that there is none: a training that should be on a GPU
        # must not begin on the CPU without a word.
        answer: wire.Message = wire.Devices(
            kind="cpu", error="torch did not answer: its process died, or took too long"
        )
        me = os.getpid()
        try:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                pid = fork(lambda: _answer_devices(Channel(theirs), message.environment, me))
                theirs.close()
                with selectors.DefaultSelector() as either, suppress(EOFError, OSError):
                    either.register(ours, selectors.EVENT_READ)
                    either.register(self.kernel, selectors.EVENT_READ)
                    ready = {key.fileobj for key, _ in either.select(_ANSWER_SECONDS)}
                    if self.kernel in ready:
                        self._kernel_gone()
                    elif ready:
                        answer, _ = Channel(ours).receive()
                processes.kill_tree([pid])
                os.waitpid(pid, 0)
        except OSError as error:  # no room for one more process, or for a descriptor
            answer = wire.Devices(kind="cpu", error=str(error))
        self._tell(msgspec.structs.replace(answer, run=message.run))


def _answer_devices(channel: Channel, environment: dict[str, str], template: int) -> None:
    processes.die_with_parent(template)
    try:
        os.environ.clear()
        os.environ.update(environment)
        tpu.load_backends()
        devices = import_module("notebook_accel.training.processes.devices")
        answer: wire.Devices = devices.inventory()
    except Exception:  # of the system, of torch, or of a library for its devices
        answer = wire.Devices(kind="cpu", error=traceback.format_exc())
    channel.send(answer)


# ---- forks: a child that says what ended it, and one that is an agent ------------------------


def fork(act: Callable[[], object]) -> int:
    """Fork a child that calls ``act`` and exits; return its pid.

    If ``act`` raises, the child prints the traceback to standard error and exits with code 1.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        processes.reset_signals()
        act()
        code = 0
    except BaseException:  # the process ends here: the kernel reads what it was
        # In one write: another child may fail at the same time.
        os.write(2, f"{_FAILED.format(os.getpid())}{traceback.format_exc()}{_END}\n".encode())
    finally:
        os._exit(code)


def traceback_of(pid: int, output: str) -> str:
    """Return the traceback of the exception that ended a child; "" if no exception ended it.

    Called in the kernel.
    """
    _, found, text = output.rpartition(_FAILED.format(pid))
    return text.partition(_END)[0] if found else ""


def run_agent(message: wire.ForkAgent, fd: int, kernel: int) -> None:
    """Run the agent of a run in this process, in a session of its own."""
    from notebook_accel.launch import agent

    os.setsid()
    channel = (FramedChannel if message.is_remote else Channel)(socket.socket(fileno=fd))
    agent.main(channel, kernel, channel.receive())


# ---- the prepared template, as the clean one keeps it ---------------------------------------


@dataclass(kw_only=True, eq=False)
class _Prepared:
    """A prepared template.

    Attributes:
        num_sent: how many of the wanted messages it was sent.
        importing: None once it has imported all of them.
    """

    pid: int
    exit_fd: int
    channel: Channel
    num_sent: int = 0
    importing: wire.ImportItem | None = None
    files: dict[str, int] = field(default_factory=dict)


class Preparer:
    """Keeps the prepared template of a clean one, in whose process it runs."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._wanted: list[wire.Import] = []
        # Why, by module or whole library. Those that failed are tried again by another process.
        self._left_out: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._problem = ""
        self._now: _Prepared | None = None
        # Of all that have not been reaped.
        self.pids: set[int] = set()

    def want(self, message: wire.Import) -> None:
        """Import the items of a message, unless the clean template or an earlier message has."""
        self._add(message)
        self._go_on()

    def state(self) -> wire.Imports:
        """Return how far the imports are; drop what was imported from files that have changed."""
        if self._now is not None and _have_changed(self._now.files):
            self._drop(self._now)
            self._go_on()
        now = self._now
        importing = now.importing.root if now and now.importing else ""
        done = self._wanted[: now.num_sent - bool(importing)] if now else ()
        return wire.Imports(
            pid=now.pid if now else 0,
            importing=importing,
            libraries=tuple(dict.fromkeys(item.root for each in done for item in each.items)),
            left_out={**self._failed, **self._left_out},
            problem=self._problem,
        )

    def fork_agent(self, message: wire.ForkAgent, fd: int) -> int:
        """Return the pid of a new agent that has the libraries; 0 if none can be had."""
        now = self._now
        if now is None or now.importing:
            return 0
        with suppress(OSError, EOFError, ProtocolError):
            now.channel.send(message, (fd,))
            if processes.is_readable(now.channel, _FORK_SECONDS):
                answer, _ = now.channel.receive()
                assert isinstance(answer, wire.Forked)
                return answer.pid
        self._drop(now)
        return 0

    def end(self) -> None:
        self._wanted.clear()
        if self._now is not None:
            self._drop(self._now)

    def _add(self, message: wire.Import) -> None:
        items = tuple(
            item
            for item in message.items
            if not _is_here(item) and self._left_out.keys().isdisjoint((item.module, item.root))
        )
        if items:
            self._wanted.append(msgspec.structs.replace(message, items=items))

    def _go_on(self) -> None:
        """Have more imported, if there is more and nothing is being imported."""
        if self._wanted and self._now is None:
            self._now = self._fork()
        now = self._now
        if now is None or now.importing or now.num_sent == len(self._wanted):
            return
        message = self._wanted[now.num_sent]
        now.num_sent += 1
        now.importing = message.items[0]
        with suppress(OSError):  # it is dead: noticed by its descriptor
            now.channel.send(message)

    def _fork(self) -> _Prepared | None:
        free = limits.free_memory()
        if free < _LITTLE_MEMORY:
            self._problem = f"only {free / (1 << 30):.1f} GB of memory are free"
            return None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                fds = [*self._server.descriptors(), ours.fileno()]
                pid = fork(partial(_serve, Channel(theirs), self._server.kernel, os.getpid(), fds))
                exit_fd = processes.watch_exit(pid)
            except OSError as error:
                ours.close()
                self._problem = f"no process could be forked for them: {error}"
                return None
        self._problem = ""
        made = _Prepared(pid=pid, exit_fd=exit_fd, channel=Channel(ours))
        self.pids.add(pid)
        self._server.selector.register(made.channel, 1, partial(self._listen, made))
        self._server.selector.register(exit_fd, 1, partial(self._reap, made))
        return made

    def _listen(self, made: _Prepared) -> None:
        try:
            messages = made.channel.drain()
        except (OSError, EOFError, ProtocolError):
            self._kill(made)
            return
        for message, _ in messages:
            if made is not self._now or not isinstance(message, wire.Importing):
                continue
            made.importing = message.item
            made.files.update(message.files)
            if message.problem:
                self._leave_out(made, message.problem)
            elif message.item and message.error:
                self._failed[message.item.module] = message.error
            self._go_on()

    def _leave_out(self, made: _Prepared, why: str) -> None:
        assert made.importing is not None
        name, root = made.importing.module, made.importing.root
        # Once two of a library's modules are at fault, likely all are: each import of one is an
        # import of the whole library, and what it imports.
        if any(other.partition(".")[0] == root for other in self._left_out):
            name = root
        self._left_out[name] = why
        self._drop(made)
        wanted, self._wanted = self._wanted, []
        for message in wanted:
            self._add(message)

    def _drop(self, made: _Prepared) -> None:
        self._now = None
        self._failed.clear()
        self._kill(made)

    def _kill(self, made: _Prepared) -> None:
        if not made.channel.closed:
            self._server.selector.unregister(made.channel)
            made.channel.close()
        os.kill(made.pid, signal.SIGKILL)

    def _reap(self, made: _Prepared) -> None:
        """Reap one that has ended: it was dropped, or what it imported has ended it."""
        if not made.channel.closed:
            self._listen(made)  # to the last that it said
        if made is self._now and made.importing:
            limit = f"{_IMPORT_SECONDS:.0f} s"
            self._leave_out(made, f"its import ended the process, or took longer than {limit}")
        elif made is self._now:
            self._drop(made)
        self._server.selector.unregister(made.exit_fd)
        os.close(made.exit_fd)
        reap(made.pid)
        self.pids.discard(made.pid)
        self._server.kill_descendants()
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


def _serve(channel: Channel, kernel: int, template: int, unneeded: Sequence[int]) -> None:
    """Be a prepared template."""
    processes.die_with_parent(template)
    for fd in unneeded:
        os.close(fd)
    # What is imported prints into nothing; an agent, forked later, says by this what ended it.
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)

    def be_agent(message: wire.ForkAgent, fd: int) -> None:
        channel.send(wire.Forked(pid=os.getpid()))
        channel.close()
        os.dup2(stderr, 2)
        os.close(stderr)
        run_agent(message, fd, kernel)

    while True:
        message, fds = channel.receive()
        if isinstance(message, wire.Import):
            _import(channel, message)
        elif isinstance(message, wire.ForkAgent):
            # Its parent ends at once, so that the clean template adopts and reaps it.
            parent = fork(partial(fork, partial(be_agent, message, fds[0])))
            os.close(fds[0])
            if os.waitpid(parent, 0)[1]:  # there was no room: the clean template forks it
                return


def _import(channel: Channel, message: wire.Import) -> None:
    os.environ.clear()
    os.environ.update(message.environment, **dict.fromkeys(ITS_THREADS, "1"), **_SAFE_COUNT)
    sys.path[:] = message.path
    invalidate_caches()  # packages may have been installed meanwhile
    gc.disable()
    files: dict[str, int] = {}
    for item in message.items:
        if not _is_here(item):
            channel.send(wire.Importing(item=item))
            before = {*sys.modules}
            # It ends the process, whatever hangs.
            signal.setitimer(signal.ITIMER_REAL, _IMPORT_SECONDS)
            error = ""
            try:
                module = import_module(item.module)
                for name in item.names:
                    if not hasattr(module, name):
                        import_module(f"{item.module}.{name}")
            except BaseException as failed:  # of the library; the kernel may be more lucky
                error = f"{type(failed).__name__}: {failed}"[:_MAX_ERROR]
            signal.setitimer(signal.ITIMER_REAL, 0)
            new = [file_of(sys.modules.get(name)) for name in sys.modules.keys() - before]
            problem = _read_files([*filter(None, new)], files) or _left_behind(channel.fileno())
            if problem or error:
                channel.send(wire.Importing(item=item, problem=problem, error=error))
    gc.enable()
    # Not collected before: that takes 0.3 s, and frees little.
    gc.freeze()
    channel.send(wire.Importing(files=files))


def _read_files(paths: Sequence[str], times: dict[str, int]) -> str:
    """Note when files were changed; return why one of them must not be there, or ""."""
    for path in paths:
        if not is_library_file(path):
            return f"it imports {path}, which may be edited"
        with suppress(OSError):  # it lies in an archive
            times[path] = os.stat(path).st_mtime_ns
    return ""


def _left_behind(own: int) -> str:
    """Return what this process has that does not survive a fork, or ""; ``own`` is a socket."""
    deadline = time.monotonic() + _THREAD_SECONDS
    while _has_threads():
        if time.monotonic() >= deadline:
            return "it starts a thread"
        time.sleep(_POLL_SECONDS)
    if processes.has_children():
        return "it starts a process"
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {own}:
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:"):
                return "it opens a socket"
            if target.startswith("/dev/") and not _HARMLESS_DEVICE.match(target):
                return f"it uses {target}"
    return ""


def _has_threads() -> bool:
    """Whether there are threads, but for those that a fork makes anew."""
    try:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    except OSError:  # one has ended meanwhile
        return True
    return len([name for name in names if name.strip() not in _SURVIVING_THREADS]) > 1
