"""The list of runs: those of this process, and on request those that other processes left on disk.

a launch: a call is sent -> add -> _known --+
                                          +--> runs()
folders of runs on disk: _read_run -------+

The public functions, such as ``notebook_accel.runs``, are in notebook/runs.py, which knows how to
show a run in a notebook.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.launch.control.call import Call, NewCall
from notebook_accel.launch.control.metrics_file import MetricReader
from notebook_accel.launch.control.results import Results
from notebook_accel.launch.control.run_folder import RunFolder, run_folders, runs_folder
from notebook_accel.launch.control.run_state import Failure, RunState
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.run import Run, call_of
from notebook_accel.launch.view import View
from notebook_accel.launch.view.plain import PlainView
from notebook_accel.system.interrupts import held

# Without its results a run is small: its last state, with the tails of its output.
_MAX_RUNS = 50
# With them it may hold gigabytes.
_MAX_HANDLES = 3


# Handles without results, the newest last.
_known: list[Run] = []
# By id, the handles that launches returned, while somebody holds them.
_handles: weakref.WeakValueDictionary[str, Run] = weakref.WeakValueDictionary()
# Those that the list itself holds, since their launches raised; the newest last.
_kept: dict[str, Run] = {}
# The newest run with its results, if its handle is gone and they were never read: nobody has
# assigned the value of the launch, and last_run() has them.
_unread: Run | None = None
# Held by whoever changes it: a cell in the background may end while another launch begins.
# Reentrant: with a run objects of the user are freed, whose finalizers may come back to this list.
_lock = threading.RLock()
# Held from the choice of accelerators until the run that uses them is in the list.
choosing = threading.Lock()


def add(run: Run) -> None:
    """Add a run that begins to the list, and drop the oldest runs if the list is too long.

    The list keeps the run's results alive only if they are not read before the handle is gone, and
    then until the next run is added.
    """
    global _unread
    call = call_of(run)
    if call.results is not None:
        weakref.finalize(run, _keep_unread, call, call.results).atexit = False
    with held(), _lock:
        _unread = None
        others = [known for known in _newest() if known.id != run.id]  # attached once more
        _known[:] = [*others, Run(call)]
        _handles[run.id] = run


def _keep_unread(call: Call, results: Results) -> None:
    global _unread
    with held(), _lock:
        run_id = call.folder.id
        is_newest = bool(_known) and _known[-1].id == run_id and run_id not in _handles
        if is_newest and not results.was_read:
            _handles[run_id] = _unread = Run(call, results=results)


def _newest() -> list[Run]:
    """Return the newest 50 runs of the list, and those older runs that must not be dropped.

    An older run must stay as long as it goes on, or the list keeps its rescued training state.
    """
    old = [
        known
        for known in _known[:-_MAX_RUNS]
        if not known.state.has_ended or (known.id in _kept and known.state.has_rescued)
    ]
    return [*old, *_known[-_MAX_RUNS:]]


def keep(run: Run) -> None:
    """Keep a run's handle, with its results, alive in the list, since its launch raises an error.

    Such a launch returns no handle. The list keeps the newest three handles of runs with a rescued
    training state, and the newest three of other runs: failures without a rescued state do not push
    out those with one.
    """
    with held(), _lock:
        _kept[run.id] = run
        rescued = [run_id for run_id, kept in _kept.items() if kept.state.has_rescued]
        failed = [run_id for run_id in _kept if run_id not in rescued]
        for run_id in (*rescued[:-_MAX_HANDLES], *failed[:-_MAX_HANDLES]):
            del _kept[run_id]


def expression(run_id: str) -> str:
    """Return Python code for messages that gets the run by its id, in any process at any time."""
    return f"import notebook_accel; notebook_accel.find_run({run_id!r})"


def expression_now(run_id: str) -> str:
    """Return Python code that gets the run, by ``last_run()`` if no newer run is in the list."""
    is_newest = bool(_known) and _known[-1].id == run_id
    return "import notebook_accel; notebook_accel.last_run()" if is_newest else expression(run_id)


def expression_to_attach(run_id: str) -> str:
    """Return Python code by which any kernel attaches to a detached run."""
    return f"import notebook_accel; notebook_accel.attach({run_id!r})"


def find_run(run_id: str, *, view: Callable[[], View] = PlainView) -> Run:
    """Return the run of this id: from the list, or from disk if another process launched it."""
    here = next((run for run in runs() if run.id == run_id), None)
    return here or read_run(run_id, view=view)


def read_run(run_id: str, *, view: Callable[[], View] = PlainView) -> Run:
    """Return the run of this id from its folder on disk."""
    on_disk = {folder.id: folder for folder in run_folders()}
    found = _read_run(on_disk[run_id], view) if run_id in on_disk else None
    if found is None:
        raise NotebookAccelError(
            f"there is no run {run_id!r} here or in {runs_folder()}: it may have been removed, as "
            "the oldest are; runs(everywhere=True) lists those that are there"
        )
    return found


def runs(*, everywhere: bool = False, view: Callable[[], View] = PlainView) -> list[Run]:
    """Return the runs in the list, the oldest first, for ``notebook_accel.runs``."""
    here = [_handles.get(known.id, known) for known in _newest()]
    if not everywhere:
        return here
    known = {run.id: run for run in here}
    found = [known.get(folder.id) or _read_run(folder, view) for folder in run_folders()]
    on_disk = {run.id for run in found if run is not None}
    # Kept elsewhere, since NOTEBOOK_ACCEL_RUNS was changed, or deleted.
    others = [run for run in here if run.id not in on_disk]
    return sorted([*(run for run in found if run is not None), *others], key=lambda run: run.id)


def least_used(devices: Sequence[int], number: int) -> tuple[tuple[int, ...], list[Run]]:
    """Return ``number`` accelerators, free ones first, and the runs of this process that use them.

    A paused run uses none. The caller holds ``choosing`` until its own run is in the list.
    """
    users: dict[int, list[Run]] = {device: [] for device in devices}
    for run in runs():
        if not run.state.has_ended and run.status != "paused":
            for device in run.state.devices:
                users.setdefault(device, []).append(run)
    taken = sorted(sorted(devices, key=lambda device: len(users[device]))[:number])
    return tuple(taken), [run for device in taken for run in users[device]]


class PastCall(Call):
    """The call of a run that another process launched, described by the run's folder on disk.

    The run may still go on. Only the process that launched it can wait for it. ``stop`` and
    ``kill`` write a file into the folder, which asks that process to end the run.
    """

    def check_waiting(self) -> None:
        if not self.state.has_ended and self.state.detached:
            raise NotebookAccelError(
                f"run {self.state.run} is detached: {expression_to_attach(self.state.run)} gives "
                "a handle that can wait for it and has its results"
            )
        if not self.state.has_ended:
            raise NotebookAccelError(
                f"run {self.state.run} goes on in another process, which alone can wait for it and "
                "have its results: do that in the notebook that launched it. How far it is from "
                "here: its logs and metrics, and runs(everywhere=True) once more"
            )

    def stop(self, grace: float | None = None) -> None:
        self._ask("stop", "" if grace is None else str(grace))

    def kill(self) -> None:
        self._ask("kill")

    def _ask(self, what: str, text: str = "") -> None:
        if not self.state.has_ended:
            self.folder.leave(what, text)


def saved_state(folder: RunFolder) -> RunState | None:
    """Return a run's state from its folder, "failed" if its process was killed; None for none."""
    # In this order: a kernel that ends between the two has saved the run's end before.
    is_held = folder.is_held
    state = folder.load()
    if state is None:
        return None
    # Asked again: a keeper may have made a deleted folder anew.
    if not state.has_ended and not is_held and not folder.is_held:
        return as_killed(state, folder.last_change())
    return state


def as_killed(state: RunState, when: float) -> RunState:
    """Return the state of a run whose process was killed."""
    message = (
        "its keeper process was killed while the run went on"
        if state.detached
        else "its kernel ended while the run went on"
    )
    return replace(state, status="failed", failure=Failure(message=message), ended=when)


def _read_run(folder: RunFolder, view: Callable[[], View]) -> Run | None:
    """Return the run that a folder on disk describes; None if its state cannot be read."""
    state = saved_state(folder)
    if state is None:
        return None
    if state.status == "starting":  # what was saved is how it began
        state = replace(state, status="running")
    try:
        config = LaunchConfig.load(folder.config_path)
    except ConfigError:  # of another version of this package
        config = LaunchConfig()
    new = NewCall(
        request=LaunchRequest(config=config, view=view()),
        state=state,
        folder=folder,
        metrics=MetricReader(folder.path),
        handle=partial(expression, state.run),
    )
    call = PastCall(new)
    if state.has_ended:
        call.ended.set()
    return Run(call)
