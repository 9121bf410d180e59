"""Runs that outlive the kernel (``detach=True``): the part that runs in a kernel.

A separate process, the keeper (keeper.py), launches such a run and controls it in place of a
kernel::

    launch_detached (starts it, sends Detach) -> keeper: starts the ranks; writes the run's folder
    kernel: AttachedCall <--RunSnapshot---- keeper       over the socket pair of the launch
    later:  attach -> AttachedCall <------ keeper       over the socket with the run's name

The keeper has its own Unix session and is no child of the kernel, because a kernel that shuts down
ends its children. It exits when its run has ended. An attached kernel gets the run's states from
the keeper; it reads logs, metrics and results from the run's folder.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import pickle
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import psutil

from notebook_accel import wire
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, LaunchError, NotebookAccelError
from notebook_accel.launch import run_list
from notebook_accel.launch.control.call import Call, NewCall
from notebook_accel.launch.control.curves import LiveCurves
from notebook_accel.launch.control.metrics_file import MetricReader
from notebook_accel.launch.control.results import StoredResults
from notebook_accel.launch.control.run_folder import RunFolder, new_run_id, runs_folder
from notebook_accel.launch.control.run_state import Failure, RunState
from notebook_accel.launch.engines import engine_for
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.payload import PackedCall, Registry, unpack_exception
from notebook_accel.launch.run import Run
from notebook_accel.launch.template.handle import followed
from notebook_accel.launch.transport.channel import Channel, ProtocolError, connect
from notebook_accel.launch.view import GuardedView, View
from notebook_accel.private.of_libraries import without_debugger
from notebook_accel.system.interrupts import held
from notebook_accel.system.modules import import_path
from notebook_accel.system.processes import is_readable, python_code

# The first process ends at once: the keeper is then the child of nobody who would end it.
_BOOT = (
    "import os; os.fork() and os._exit(0); "
    "from notebook_accel.launch.keeper import serve; serve({fd})"
)
# A keeper that begins its run listens in a moment; one that ends has saved its state before.
_CONNECT_SECONDS = 5.0
# A keeper sends the run's state at once, unless its process is stopped.
_ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.05
_STACKS_SECONDS = 10.0


def check_can_detach(config: LaunchConfig, *, block: bool) -> None:
    """Raise an error if ``detach=True`` does not go together with the other launch arguments."""
    if block:
        raise ConfigError(
            "detach=True with block=True: a detached run goes on without its cell. Pass "
            "block=False, too; run.wait() waits for it"
        )
    engine = engine_for(config)
    if not engine.can_detach:
        raise ConfigError(
            f"detach=True: runs of {engine.description} end with the kernel. Take engine='local', "
            "or leave detach out"
        )


def launch_detached(request: LaunchRequest, packed: PackedCall, *, notebook_file: str) -> Run:
    """Start a keeper process that launches the run; return the run's handle once the run has begun.

    If the launch is interrupted, the keeper ends the run.

    Args:
        notebook_file: path of the notebook's file; "" for none.
    """
    asked = replace(
        request.without_function(),
        view=GuardedView(View()),
        run_id=request.run_id or new_run_id(),
    )
    about = {"models": packed.models, "uses_torch": packed.uses_torch}
    with without_debugger(), tempfile.TemporaryFile() as stderr, contextlib.ExitStack() as undo:
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        undo.callback(channel.close)
        with theirs:
            boot = python_code(_BOOT.format(fd=theirs.fileno()))
            subprocess.run(
                # By this it is found, and named in lists of processes.
                [*boot, "notebook-accel", asked.run_id, asked.name],
                env={**os.environ, "JPY_SESSION_NAME": notebook_file},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                check=False,
            )
        try:
            pickled = pickle.dumps((asked, about, import_path(), followed()))
            payload = packed.parcel.packet
            channel.send(wire.Detach(request=pickled, payload=payload), packed.parcel.fds)
            packed.parcel.close()
            first, _ = channel.receive()
        except (OSError, EOFError) as error:
            stderr.seek(0)
            text = stderr.read().decode(errors="replace").strip()
            raise LaunchError(
                "the process that keeps a detached run ended before the run had begun. Launch "
                f"again.{text and f' It wrote:{chr(10)}{text[-2000:]}'}"
            ) from error
        if isinstance(first, wire.Raised):
            raise unpack_exception(first.pickled, Registry()) or LaunchError(first.text)
        assert isinstance(first, wire.RunSnapshot), first
        undo.pop_all()

    with held() as presses:
        with contextlib.suppress(OSError):  # a keeper that was killed just now: the run has failed
            # It waits for this: somebody has the run's id.
            channel.send(wire.Alive())
        state = _state_of(first)
        folder = RunFolder(runs_folder() / state.run)
        call = AttachedCall(channel, first, folder, request.config, request.view)
        run = _opened(call, replace(request, view=View()))
        if presses.count:
            # Nobody gets the handle.
            call.kill()
        return run


def has_keeper(run_id: str) -> bool:
    """Return whether a keeper of this run lives on this machine; it may not have begun the run."""
    found = psutil.process_iter(["cmdline"])
    return any(run_id in (process.info["cmdline"] or ()) for process in found)


def attach(run_id: str, *, view: Callable[[], View], view_of_past: Callable[[], View]) -> Run:
    """Return the handle of a detached run; if it still goes on, show it live in this kernel."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        run = run_list.read_run(run_id, view=view_of_past)
        if not run.state.detached:
            raise NotebookAccelError(
                f"run {run_id} is not detached: the kernel that launched it alone has its results "
                "(detach=True lets a run outlive its kernel). Its logs and metrics: "
                f"{run_list.expression(run_id)}"
            )
        if run.state.has_ended:
            return run
        try:
            channel = connect(run_id)
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                continue
            raise NotebookAccelError(
                f"run {run_id} goes on, but its keeper cannot be reached ({error}): it may be on "
                f"another machine, or in another container, that shares {runs_folder()}. Attach "
                "there"
            ) from None
        if channel is None:
            raise NotebookAccelError(f"the keeper of run {run_id} is another user's process")
        if not is_readable(channel, _ANSWER_SECONDS):
            channel.close()
            raise NotebookAccelError(
                f"the keeper of run {run_id} gives no answer: its process may be stopped, or the "
                f"machine short of memory. Its logs and metrics: {run_list.expression(run_id)}"
            )
        try:
            first, _ = channel.receive()
        except EOFError:  # it ends just now
            channel.close()
            continue
        except ProtocolError as error:
            channel.close()
            raise NotebookAccelError(
                f"run {run_id} was launched by another version of notebook-accel ({error}): attach "
                "with that one. Its logs, metrics and `notebook-accel stop` work here"
            ) from None
        assert isinstance(first, wire.RunSnapshot), first
        folder = RunFolder(run.log_dir)
        return _opened(AttachedCall(channel, first, folder, run.config, GuardedView(view())))


def _opened(call: AttachedCall, request: LaunchRequest | None = None) -> Run:
    """Add a run that a keeper controls to the list of runs, show it, and return its handle."""
    run = Run(call, results=call.results, request=request)
    with held():
        run_list.add(run)
        call.view.open(Run(call))
        call.start()
    return run


def _state_of(snapshot: wire.RunSnapshot) -> RunState:
    return msgspec.msgpack.decode(snapshot.state, type=RunState)


class AttachedCall(Call):
    """The call of a detached run, in a kernel that is attached to the run.

    A thread receives the run's states from its keeper process. Methods such as ``stop`` and
    ``kill`` send a request to the keeper, which carries it out.
    """

    def __init__(
        self,
        channel: Channel,
        first: wire.RunSnapshot,
        folder: RunFolder,
        config: LaunchConfig,
        view: View,
    ) -> None:
        new = NewCall(
            request=LaunchRequest(config=config, view=view),
            state=_state_of(first),
            folder=folder,
            metrics=MetricReader(folder.path),
            handle=partial(run_list.expression_to_attach, folder.id),
        )
        super().__init__(new, results=StoredResults(folder.path))
        self._channel = channel
        self._lock = threading.RLock()  # of who sends
        self._stacks: dict[float, str] = {}
        self._new_metrics = MetricReader(folder.path)
        self._context = contextvars.copy_context()
        self.curves = LiveCurves()
        self._take(first)

    def start(self) -> None:
        name = f"attached-{self.state.run}"
        threading.Thread(target=self._listen, name=name, daemon=True).start()

    def stop(self, grace: float | None = None) -> None:
        self._send(wire.Stop(grace=grace))

    def kill(self) -> None:
        self._send(wire.Kill())

    def press(self, number: int) -> None:
        self._send(wire.Kill() if number > 1 else wire.Interrupt())

    def stacks(self, rank: int | None = None) -> str:
        asked = wire.DumpStacks(rank=rank)
        self._send(asked)
        deadline = time.monotonic() + _STACKS_SECONDS
        while not self.ended.is_set() and time.monotonic() < deadline:
            if asked.monotonic in self._stacks:
                return self._stacks.pop(asked.monotonic)
            time.sleep(_POLL_SECONDS)
        return "the run has ended, or its keeper gave no answer\n"

    def _send(self, message: wire.Message) -> None:
        # A keeper that is gone has ended its run.
        with held(), self._lock, contextlib.suppress(OSError):
            if not self._channel.closed:
                self._channel.send(message)

    def _listen(self) -> None:
        try:
            while not self.state.has_ended:
                message, _ = self._channel.receive()
                if isinstance(message, wire.Stacks):
                    self._stacks[message.monotonic] = message.text
                elif isinstance(message, wire.RunSnapshot):
                    self._take(message)
                    self._context.run(self.view.update, self.state)
        except (EOFError, OSError, ProtocolError, msgspec.MsgspecError):
            self.state = self._state_without_keeper()
        with self._lock:
            self._channel.close()
        self._context.run(self.view.close, self.state)
        # From here on only handles keep results that were read.
        self.curves = self.results = None
        self.ended.set()

    def _take(self, snapshot: wire.RunSnapshot) -> None:
        if self.curves is not None:
            for row in self._new_metrics.read_new():
                self.curves.add(row["rank"], row["step"], {row["name"]: row["value"]})
        self.state = _state_of(snapshot)

    def _state_without_keeper(self) -> RunState:
        saved = self.folder.load()
        if saved is not None and saved.has_ended:
            return saved
        failure = Failure(
            message="the process that keeps the run (its keeper) was killed, and the ranks with it"
        )
        return replace(self.state, status="failed", failure=failure, ended=self.state.now())
