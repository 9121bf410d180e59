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
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import traceback
from functools import partial
from importlib import import_module

import msgspec

from notebook_accel import tpu, wire
from notebook_accel.launch.template.forking import end_everything, fork, run_agent
from notebook_accel.launch.template.prepared import Preparer, reap
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.system import limits, processes, scratch

# torch._dynamo: the first optimizer of a process imports it, 2 s in every rank otherwise. Of the
# standard library, what a bar (multiprocessing.synchronize) and a connection (encodings.idna) need.
_PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.multiprocessing"),
    *("multiprocessing.synchronize", "torch.nn.parallel", "torch.utils.data", "numpy"),
    *("encodings.idna", "cloudpickle", "psutil", "tqdm.auto", "notebook_accel.launch.agent"),
    *("notebook_accel.launch.setup.libraries", "notebook_accel.launch.setup.notebook_state"),
    "notebook_accel.launch.worker.bars",
    *("notebook_accel.training.accelerator", "notebook_accel.training.strategies.ddp"),
)
# A driver that was asleep names its devices within seconds; a broken one never does.
_ANSWER_SECONDS = 60.0


def serve(fd: int, kernel_pid: int) -> None:
    """Run the template process: import torch, then serve the kernel's requests.

    This returns once the kernel has closed the connection and all agents have ended. When the
    kernel's process ends, this kills all agents and exits the process.
    """
    kernel = processes.watch_exit(kernel_pid)
    if os.getppid() != kernel_pid:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "rb") as nothing:  # in place of the pipe of end_on_hangup
        os.dup2(nothing.fileno(), 0)
    processes.adopt_orphans()
    # Two descriptors for each agent that lives.
    limits.raise_limit()
    with processes.acting_on_exit(kernel, end_everything):
        # The collector would look through what is imported again and again, which takes a tenth of
        # the time of the imports.
        gc.disable()
        for name in _PRELOADED:
            import_module(name)
        tpu.backends()
        # The first such block of a process imports more (torch 2.13): every optimizer's step has
        # one, and it would take each rank some 5 ms.
        with import_module("torch").autograd.profiler.record_function("template"):
            pass
        gc.enable()
        # Not collected before: that takes 0.3 s, in which the first launch may wait.
        gc.freeze()
    channel = Channel(socket.socket(fileno=fd))
    with contextlib.suppress(OSError):
        channel.send(wire.TemplateReady(version=wire.VERSION))
    Server(channel, kernel).run()


class Server:
    """The event loop of the template process: answers the kernel's requests, reaps ended agents."""

    def __init__(self, channel: Channel, kernel: int) -> None:
        self._channel = channel
        self._kernel = kernel
        self._agents: dict[int, int] = {}
        self._runs: dict[int, str] = {}
        self._selector = selectors.DefaultSelector()
        self._is_retired = False
        self._preparer = Preparer(kernel, self._selector, self._descriptors, self._kill_descendants)
        self._kernel_gone = partial(end_everything, self._runs)
        self._selector.register(self._kernel, selectors.EVENT_READ, self._kernel_gone)
        self._selector.register(self._channel, selectors.EVENT_READ, self._from_kernel)

    def run(self) -> None:
        while self._agents or self._preparer.pids or not self._is_retired:
            for key, _ in self._selector.select():
                # Another one of them may have taken it out meanwhile.
                if self._selector.get_map().get(key.fd) == key:
                    key.data()

    def _descriptors(self) -> list[int]:
        """Return the descriptors of this process that a child closes: all but the kernel's."""
        watched = (key.fd for key in self._selector.get_map().values())
        return [self._selector.fileno(), *(fd for fd in watched if fd != self._kernel)]

    def _kill_descendants(self) -> list[int]:
        return processes.kill_descendants(keep={*self._agents, *self._preparer.pids})

    def _from_kernel(self) -> None:
        try:
            messages = self._channel.drain()
        except (EOFError, OSError, ProtocolError):
            # Retired: runs that are under way go on, and their kernel is still watched.
            self._selector.unregister(self._channel)
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
            for number in self._descriptors():
                os.close(number)
            run_agent(message, fds[0], self._kernel)

        pid = 0
        try:
            prepared = self._preparer.fork_agent(message, fds[0]) if message.is_prepared else 0
            pid = prepared or fork(be_agent)
            exit_fd = processes.watch_exit(pid)
            self._selector.register(exit_fd, selectors.EVENT_READ, lambda: self._reap(pid))
            self._agents[pid], self._runs[pid] = exit_fd, message.run
            answer = wire.Forked(run=message.run, pid=pid)
        except OSError as error:  # no room for one more process, or for a descriptor
            if pid:
                os.kill(pid, signal.SIGKILL)
                reap(pid)
            answer = wire.Forked(run=message.run, error=str(error))
        for fd in fds:
            os.close(fd)
        self._tell(answer)

    def _reap(self, pid: int) -> None:
        exit_fd = self._agents.pop(pid)
        self._selector.unregister(exit_fd)
        os.close(exit_fd)
        status = reap(pid)
        # What the agent would have ended itself, had it not been killed.
        reaped = self._kill_descendants()
        scratch.remove(self._runs.pop(pid), pid, used_by=reaped)
        self._tell(wire.AgentExited(pid=pid, exitcode=os.waitstatus_to_exitcode(status)))

    def _tell(self, message: wire.Message) -> None:
        with contextlib.suppress(OSError):
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
                channel = Channel(ours)
                ours.settimeout(_ANSWER_SECONDS)
                with (
                    processes.acting_on_exit(self._kernel, self._kernel_gone),
                    contextlib.suppress(EOFError, OSError),
                ):
                    answer, _ = channel.receive()
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
