"""Runs that outlive the kernel (``detach=True``): the part that runs in a kernel.

A separate process, the keeper (keeper.py), launches such a run and controls it in place of a
kernel::

    launch_detached (starts it, sends Detach) -> keeper: starts the ranks; writes the run's folder
    this kernel, and a later one that attaches: AttachedCall <-- the run's folder

The keeper has its own Unix session and is no child of the kernel, because a kernel that shuts down
ends its children. It exits when its run has ended. Kernels have all of the run from its folder: the
state, which the keeper writes when a kernel asks for it, logs, metrics and results.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import psutil

from notebook_accel import wire
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, LaunchError, NotebookAccelError
from notebook_accel.launch import run_list
from notebook_accel.launch.control.call import NewCall
from notebook_accel.launch.control.curves import LiveCurves
from notebook_accel.launch.control.metrics_file import MetricReader
from notebook_accel.launch.control.results import StoredResults
from notebook_accel.launch.control.run_folder import new_run_id
from notebook_accel.launch.engines import engine_for
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.payload import PackedCall, Registry, unpack_exception
from notebook_accel.launch.run import Run, call_of
from notebook_accel.launch.template.handle import followed
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.view import GuardedView, View
from notebook_accel.private.of_libraries import without_debugger
from notebook_accel.system.interrupts import held
from notebook_accel.system.modules import import_path
from notebook_accel.system.processes import python_code

# The first process ends at once: the keeper is then the child of nobody who would end it.
_BOOT = (
    "import os; os.fork() and os._exit(0); "
    "from notebook_accel.launch.keeper import serve; serve({fd})"
)
# A keeper answers in a moment, unless its process is stopped; with stacks once it has them, which
# it awaits for 10 seconds itself (control/pool.py).
_ANSWER_SECONDS = 10.0
_STACKS_SECONDS = 15.0
_POLL_SECONDS = 0.05
# As often as a kernel draws.
_LOOK_SECONDS = 0.2
# A keeper whose run's folder was deleted makes it anew in a moment.
_MAKE_SECONDS = 2.0


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


def launch_detached(request: LaunchRequest, packed: PackedCall, notebook_file: str) -> Run:
    """Start a keeper process that launches the run; return the run's handle once the run has begun.

    If the launch is interrupted, the keeper ends the run.

    Args:
        notebook_file: path of the notebook's file; "" for none.
    """
    asked = replace(
        request.without_function(), view=GuardedView(View()), run_id=request.run_id or new_run_id()
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
        # From here on the run is found by its id, for which the keeper waits.
        with held() as presses:
            past = run_list.read_run(asked.run_id)
            with contextlib.suppress(OSError):  # it was killed just now: the run has failed
                channel.send(wire.Alive())
            run = _opened(past, request.view, replace(request, view=View()))
            if presses.count:
                # Nobody gets the handle.
                run.kill()
        return run


def has_keeper(run_id: str) -> bool:
    """Return whether a keeper of this run lives on this machine; it may not have begun the run."""
    return bool(_keepers(run_id))


def _keepers(run_id: str) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    named = ["notebook-accel", run_id]
    return [one for one in found if (one.info["cmdline"] or [])[-3:-1] == named]


def attach(run_id: str, *, view: Callable[[], View], view_of_past: Callable[[], View]) -> Run:
    """Return the handle of a detached run; if it still goes on, show it live in this kernel."""
    run = run_list.read_run(run_id, view=view_of_past)
    if not run.state.detached:
        raise NotebookAccelError(
            f"run {run_id} is not detached: the kernel that launched it alone has its results "
            "(detach=True lets a run outlive its kernel). Its logs and metrics: "
            f"{run_list.expression(run_id)}"
        )
    if run.state.has_ended:
        return run
    folder, deadline = call_of(run).folder, time.monotonic() + _ANSWER_SECONDS
    with contextlib.suppress(OSError):  # another kernel asks just now, say
        folder.leave("state")
    while folder.has_left("state"):
        if time.monotonic() >= deadline:
            raise NotebookAccelError(
                f"the keeper of run {run_id} gives no answer: its process may be stopped, or the "
                f"machine short of memory. Its logs and metrics: {run_list.expression(run_id)}"
            )
        time.sleep(_POLL_SECONDS)
        run = run_list.read_run(run_id, view=view_of_past)
        if run.state.has_ended:
            return run
    return _opened(run, GuardedView(view()))


def _opened(past: Run, view: View, request: LaunchRequest | None = None) -> Run:
    """Add a run that a keeper controls to the list of runs, show it, and return its handle."""
    folder = call_of(past).folder
    call = AttachedCall(
        NewCall(
            request=LaunchRequest(config=past.config, view=view),
            # Read again: what others read says "running" of a run that has only begun, and the
            # keeper may have saved a newer state since.
            state=run_list.saved_state(folder) or past.state,
            folder=folder,
            metrics=MetricReader(folder.path),
            handle=partial(run_list.expression_to_attach, past.id),
        )
    )
    run = Run(call, results=call.results, request=request)
    with held():
        run_list.add(run)
        call.view.open(Run(call))
        threading.Thread(target=call.follow, name=f"attached-{run.id}", daemon=True).start()
    return run


class AttachedCall(run_list.PastCall):
    """The call of a detached run, in a kernel that is attached to the run.

    A thread reads the run's newest state from its folder, into which the keeper writes it when it
    is asked. Requests such as a stop go the same way.
    """

    def __init__(self, new: NewCall) -> None:
        super().__init__(new)
        self.results = StoredResults(new.folder.path)
        self.curves = LiveCurves()

    def check_waiting(self) -> None:
        return

    def press(self, number: int) -> None:
        if number > 1:
            self.kill()
        else:
            with contextlib.suppress(OSError):  # the wait goes on
                self._ask("interrupt")

    def kill(self) -> None:
        try:
            super().kill()
        except OSError:  # the folder is gone, or cannot be written
            keepers = _keepers(self.folder.id)
            if not keepers:
                raise
            for keeper in keepers:
                # Its ranks end with it.
                with contextlib.suppress(psutil.NoSuchProcess):
                    keeper.kill()

    def _ask(self, what: str, text: str = "") -> None:
        deadline = time.monotonic() + _MAKE_SECONDS
        while True:
            try:
                return super()._ask(what, text)
            except FileNotFoundError:  # its folder was deleted: the keeper makes it anew
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_SECONDS)

    def stacks(self, rank: int | None = None) -> str:
        asked = f"stacks-{secrets.token_hex(4)}"
        self._ask(asked, "" if rank is None else str(rank))
        deadline = time.monotonic() + _STACKS_SECONDS
        while not self.ended.is_set() and time.monotonic() < deadline:
            if (text := self.folder.take(f"answer-{asked}")) is not None:
                return text
            time.sleep(_POLL_SECONDS)
        return "the run has ended, or its keeper gave no answer\n"

    def follow(self) -> None:
        """Show each new state of the run, until it has ended; called in a thread."""
        curves, rows = self.curves, MetricReader(self.folder.path)
        assert curves is not None, "until the end"
        while not self.state.has_ended:
            with contextlib.suppress(OSError):  # its folder was deleted: the keeper makes it anew
                self.folder.leave("state")
            time.sleep(_LOOK_SECONDS)
            saved = run_list.saved_state(self.folder)
            if saved is None and not has_keeper(self.folder.id):
                saved = run_list.as_killed(self.state, time.time())
            for row in rows.read_new():
                curves.add(row["rank"], row["step"], {row["name"]: row["value"]})
            if saved not in (None, self.state):
                self.state = saved
                self._context.run(self.view.update, saved)
        self.folder.take("state")
        self.conclude()
