"""Launches and sessions: check the request, pickle the function, have an engine begin the run.

    launch --> launch_packed --> _begin_and_wait, with Engine.begin, which starts ranks
    Session.call -------------> _begin_and_wait, with Session._send

A session is a set of ranks that stay alive between calls. The engines' part is in engines/local.py.
Once a call is sent, the thread of the ranks' pool (control/pool.py) brings the run to its end.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from notebook_accel.config import LaunchConfig
from notebook_accel.config.checks import as_seconds, shown
from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.launch import preflight, run_list
from notebook_accel.launch.control.call import Call, NewCall, RankCall
from notebook_accel.launch.control.metrics_file import MetricStore
from notebook_accel.launch.control.run_folder import RunFolder
from notebook_accel.launch.control.run_state import RESCUED, ProcessState, starting
from notebook_accel.launch.control.stacks import stacks_text
from notebook_accel.launch.detached import check_can_detach, launch_detached
from notebook_accel.launch.engines import Engine, RankPlan, engine_for
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.payload import PackedCall, Registry, pack_call
from notebook_accel.launch.preflight import look_at_machine
from notebook_accel.launch.rank_environment import rank_environment
from notebook_accel.launch.run import Run, call_of, raise_error, save_for_clone
from notebook_accel.launch.setup import pack_step, states
from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import escaped, one_line
from notebook_accel.launch.view import GuardedView, View
from notebook_accel.rank.knobs import checked
from notebook_accel.system.interrupts import Presses, held
from notebook_accel.system.limits import check_open_files, naming_what_is_short
from notebook_accel.wire import KnobValue

# SIGKILL takes milliseconds; a rank in the middle of a large write to a disk or device, longer.
_KILL_SECONDS = 10.0
# Calls of a session after which old runs are removed: at each call it would take as long as a short
# cell, and a kernel may have one session for days.
_CALLS_BETWEEN_REMOVALS = 25
# Characters of a run's name and of its arguments: each stands in one line with state and time.
_MAX_NAME = _MAX_ARGUMENTS = 60
# In the folder of a run that was stopped, once another goes on from there.
_STOPPED = "stopped"
_OF_TRAINERS = "(a Trainer goes on from its own: trainer.train(resume_from_checkpoint=True))"


def launch(request: LaunchRequest) -> Run:
    """Start ranks, call a function on each of them, and return the handle of this run.

    If ``request.block`` is true, it returns once the run has ended, otherwise once the run has
    begun.

    Raises:
        WorkerError, RunStopped, TimeoutError: as for ``Run.wait``; only if ``request.block``.
    """
    request = _checked(request)
    if request.detach:
        check_can_detach(request.config, block=request.block)
    packed = None
    try:
        with _telling_failure(request.view):
            if engine_for(request.config).starts_ranks:
                preflight.check_platform()
                packed = _pack(request)
                request = replace(request, notices=(*packed.notices, *request.notices))
            if request.detach:
                assert packed is not None, "Engine.can_detach"
                request.view.launch_is_slow(request.name)
                return launch_detached(request, packed, notebook_file())
        return launch_packed(request, packed)
    except BaseException:
        # IPython keeps the traceback, and with it the copy of all that the function uses.
        if packed is not None:
            packed.parcel.close()
        raise


def launch_packed(request: LaunchRequest, packed: PackedCall | None) -> Run:
    """Do the second half of a launch: start the ranks, send them the pickled call, return the run.

    :func:`launch` calls this function in the kernel. The keeper process of a detached run calls it
    too, with the function and arguments that the kernel has pickled.

    Args:
        packed: the pickled function and arguments; None for an engine that needs no pickle.

    Raises:
        ConfigError, LaunchError, WorkerError, RunStopped, TimeoutError: as for :func:`launch`.
    """
    engine = engine_for(request.config)
    with _telling_failure(request.view):
        plan = _plan(engine, request)
    notices = (*request.notices, *plan.notices, *_shared_devices(request, plan.devices))
    request = replace(request, notices=notices, devices=plan.devices)
    return _begin_and_wait(request, partial(engine.begin, plan, packed), plan.world_size)


def _begin_and_wait(
    request: LaunchRequest,
    begin: Callable[[NewCall], AbstractContextManager[Call]],
    world_size: int,
    session: RunFolder | None = None,
    *,
    is_listed: bool = True,
) -> Run:
    """Begin a call, list and show its run, and return the run."""
    run: Run | None = None
    try:
        with held() as presses:
            with naming_what_is_short(), contextlib.ExitStack() as undo:
                undo.callback(request.view.launch_failed)
                if session is not None:
                    check_open_files()
                folder = RunFolder.make(run_id=request.run_id)
                undo.callback(folder.remove)
                if session is not None:
                    folder.link_logs(session, world_size)
                metrics = MetricStore(folder.path)
                undo.callback(metrics.close)
                typed = run_list.expression_to_attach if request.detach else run_list.expression_now
                new = NewCall(
                    request=request,
                    state=starting(
                        run=folder.id,
                        name=request.name,
                        world_size=world_size,
                        started=time.time(),
                        notices=request.notices,
                        timeout=request.timeout,
                        session="" if session is None else session.id,
                        asked=request.asked,
                        arguments=request.arguments,
                        devices=request.devices,
                        notebook=one_line(escaped(os.path.basename(notebook_file())), _MAX_NAME),
                        detached=request.detach,
                        origin=request.origin,
                        trial=request.trial,
                    ),
                    folder=folder,
                    metrics=metrics,
                    handle=partial(typed, folder.id),
                )
                with begin(new) as call:
                    again = replace(request, view=View(), notices=(), run_id="")
                    run = Run(call, results=call.results, request=again, clone=clone_run)
                    # From here on the call itself ends what it has begun.
                    undo.pop_all()
                    call.folder.save(call.state, call.config)
                    if is_listed:
                        run_list.add(run)
                    request.view.open(Run(call))
                # Only now, while the ranks work.
                if call.number % _CALLS_BETWEEN_REMOVALS <= 1:
                    call.folder.remove_old()
            if request.block or presses.count:
                _wait_in_cell(run, presses)
    except BaseException as error:
        if run is not None:
            _keep_run_without_handle(run, error)
        raise
    return run


class Session:
    """Ranks that stay alive between calls, with the state that earlier calls left in them.

    The ranks end with :meth:`close`, or with this process. After a call that did not return on
    every rank, the ranks destroy their process group, and the next call that needs a process group
    makes a new one.

    Attributes:
        folder: has a log file for each rank, with the rank's output of all calls.
        newest_call: a handle of the newest call, without results; calls of :meth:`ask` count. None
            before the first call.
    """

    def __init__(self, request: LaunchRequest) -> None:
        preflight.check_platform()
        request = _checked(request)
        self.request = LaunchRequest(
            config=request.config,
            environment=request.environment,
            advise=False,
            brings_globals=False,
        )
        engine = engine_for(request.config)
        plan = _plan(engine, request, ranks_stay=True)
        self._registry = Registry()
        self.newest_call: Run | None = None
        self.notices = plan.notices
        with contextlib.ExitStack() as undo:
            # An interrupt that is held here is raised at the end of that block. The ranks run by
            # then and the caller never gets the session, so `undo` ends them.
            with held(), naming_what_is_short():
                self.folder = RunFolder.make()
                undo.callback(self.folder.remove)
                self.folder.make_logs(plan.world_size)
                self._pool = engine.start_ranks(request, plan, self.folder)
                undo.callback(self.kill)
                self._pool.start()
            # An interrupt may still come before the caller has the session, which nobody can close
            # then.
            weakref.finalize(self, self._pool.kill).atexit = False
            undo.pop_all()

    def call(self, request: LaunchRequest, *, is_listed: bool = True) -> Run:
        """Call the function of ``request`` on every rank, and return the run of this call.

        If ``request.block`` is true, it returns once the call has ended, otherwise once the call
        was sent. The list of runs has the run if ``is_listed`` is true.

        Raises:
            WorkerError, RunStopped, TimeoutError: as for ``Run.wait``; only if ``request.block``.
        """
        request = _checked(replace(request, environment=self.request.environment))
        self._pool.check_free()
        registry = None if request.brings_globals else self._registry
        packed = _pack(request, registry, are_new=self.newest_call is None)
        request = replace(request, notices=(*packed.notices, *request.notices))
        begin = partial(self._send, packed)
        return _begin_and_wait(request, begin, self.world_size, self.folder, is_listed=is_listed)

    @contextlib.contextmanager
    def _send(self, packed: PackedCall, new: NewCall) -> Iterator[Call]:
        call = RankCall(self._pool, packed, new)
        with call.sent(last=False):
            self.newest_call = Run(call)
            yield call
        self._registry = packed.registry

    def ask(
        self, function: Callable[..., Any], kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> list[Any]:
        """Call a function on every rank, wait, and return the results in the order of the ranks.

        It serves internal questions: no view shows the call, and the list of runs does not keep it.
        """
        request = replace(self.request, function=function, kwargs=kwargs, view=View(), block=False)
        run: Run | None = None
        try:
            run = self.call(request, is_listed=False)
            _wait_in_cell(run)
            return list(run)
        except BaseException as error:
            # A call that was interrupted while it began has returned no handle: the error carries
            # the run, which has ended.
            run = run or getattr(error, "run", None)
            raise
        finally:
            if run is not None:
                call_of(run).folder.remove()

    @property
    def world_size(self) -> int:
        return len(self._pool.processes)

    @property
    def status(self) -> str:
        """Status: "starting", "ready", "busy" (in a call), "broken" (a rank died) or "ended"."""
        if self._pool.ended.is_set():
            return "ended"
        processes = {process.status for process in self._pool.processes}
        if "ended" in processes:
            return "broken"
        if self._pool.is_in_call:
            return "busy"
        return "starting" if "starting" in processes else "ready"

    @property
    def processes(self) -> tuple[ProcessState, ...]:
        return self._pool.processes

    def stacks(self, rank: int | None = None) -> str:
        """Return the current Python stacks of ``rank`` as text; None stands for all ranks."""
        return stacks_text(self._pool.stacks(rank), {})

    def close(self, grace: float = LaunchConfig.grace) -> None:
        """Have the ranks end after their current call, and wait until they have ended.

        Ranks that have not ended after ``grace`` seconds are killed. A KeyboardInterrupt during the
        wait kills the ranks at once.
        """
        try:
            self._pool.shut_down()
            self._pool.ended.wait(grace)
        finally:
            if not self._pool.ended.is_set():
                self.kill()

    def kill(self) -> None:
        """Kill the ranks and all processes that they started; wait a few seconds for their end."""
        self._pool.kill()
        self._pool.ended.wait(_KILL_SECONDS)


def notebook_file() -> str:
    """Return the path of the notebook's file, from VS Code or Jupyter's server; "" if unknown."""
    told = getattr(sys.modules["__main__"], "__vsc_ipynb_file__", None)
    return told if isinstance(told, str) else os.environ.get("JPY_SESSION_NAME", "")


def check_ranks(config: LaunchConfig) -> None:
    """Raise an error if ranks could not be started with these settings; start none."""
    preflight.check_platform()
    request = _checked(LaunchRequest(config=config))
    engine = engine_for(config)
    engine.warm_up(request)
    if not engine.num_awaited(config):
        preflight.check_files_of_ranks(engine.plan_ranks(request).world_size)


def _checked(request: LaunchRequest) -> LaunchRequest:
    function, args, kwargs = request.function, request.args, request.kwargs
    if not isinstance(request.block, bool):
        raise ConfigError(f"block={shown(request.block)}: expected True or False")
    timeout = request.timeout
    if timeout is not None:
        timeout = as_seconds("timeout", timeout, above_zero=True)
    preflight.check_call(function, args, kwargs)
    name = request.name or str(getattr(function, "__name__", type(function).__name__))
    # What a session's ranks are called with is a request of the notebook; names that it pushes are
    # no arguments.
    named = named_arguments(function, args, kwargs)
    if not request.brings_globals:
        named = getattr(function, "args", ()), getattr(function, "kwargs", {})
    return replace(
        request,
        args=tuple(args),
        kwargs=dict(kwargs),
        timeout=timeout,
        # Whoever makes functions names them freely, and the name stands in lines for the person.
        name=one_line(name, _MAX_NAME),
        arguments=one_line(wording.arguments(*named), _MAX_ARGUMENTS),
        environment=request.environment or rank_environment(request.config),
        view=GuardedView(request.view),
    )


def named_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call with the positional ones by their names, if all have one."""
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs
    names = list(bound.arguments)[: len(args)]
    kinds = {bound.signature.parameters[name].kind for name in names}
    if kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        return (), {**dict(zip(names, args, strict=True)), **kwargs}
    return args, kwargs


def _wait_in_cell(run: Run, *before: Presses) -> None:
    """Wait for the end of the run in the main thread, and raise the run's error if it has one."""
    with held(patience=None) as presses:
        call_of(run).wait(presses=[*before, presses])
    raise_error(run)


def _pack(
    request: LaunchRequest, session: Registry | None = None, *, are_new: bool = True
) -> PackedCall:
    """Pack the call of ``request`` for ranks that are new, or have had a call of the session."""
    state = states.capture(request.config.seed) if are_new else None
    first = [pack_step("notebook", "", "", states.apply, state)] if state else []
    with naming_what_is_short():
        return pack_call(
            request.function,
            request.args,
            request.kwargs,
            sources=request.sources,
            session=session,
            setup=[*first, *request.setup],
        )


def _plan(engine: Engine, request: LaunchRequest, *, ranks_stay: bool = False) -> RankPlan:
    engine.warm_up(request)
    preflight.check_port(request.config)  # before an engine listens there itself
    expected = 0 if request.block else engine.num_awaited(request.config)
    if expected and not ranks_stay:
        return RankPlan.of_sizes(expected, is_awaited=True)
    try:
        plan = engine.plan_ranks(request)
        preflight.check_files_of_ranks(plan.world_size)
    except BaseException:
        # The traceback, which IPython keeps, would hold the engine, and with it an open port.
        engine.close()
        raise
    return plan


@contextlib.contextmanager
def _telling_failure(view: View) -> Iterator[None]:
    try:
        yield
    except BaseException:
        view.launch_failed()
        raise


def clone_run(
    request: LaunchRequest,
    run: Run,
    changes: Mapping[str, Any],
    *,
    warm: bool,
    block: bool,
    name: str = "",
    knobs: Mapping[str, KnobValue] = MappingProxyType({}),
    view: View | None = None,
) -> Run:
    """Launch the request of a run anew, with other arguments or knobs; ``Run.clone`` says more."""
    if run.state.session:
        raise ConfigError(
            "clone(): a call of a session is not cloned. Call the function in the session again, "
            "or launch it without session=True"
        )
    args, kwargs, changed = _changed_call(request, run, changes)
    request = replace(
        request,
        args=args,
        kwargs=kwargs,
        knobs={**request.knobs, **knobs, **changed},
        environment={},
        resume=folder_for_clone(run) if warm else request.resume,
        origin=run.id,
        trial=None,
        name=name or wording.arguments((), changes) or request.name,
        block=block,
        view=request.new_view(waits=block) if view is None else view,
    )
    if not run.state.devices or run.state.has_ended:
        return launch(request)
    with run_list.choosing:
        config = replace(request.config, devices=_free_devices(run))
        # It waits once others may choose.
        cloned = launch(replace(request, config=config, block=False))
    if block:
        try:
            _wait_in_cell(cloned)
        except BaseException as error:
            _keep_run_without_handle(cloned, error)
            raise
    return cloned


def _changed_call(
    request: LaunchRequest, run: Run, changes: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, KnobValue]]:
    """Return arguments and knobs after ``changes``, each of which names one of either."""
    signature, made = inspect.signature(request.function), run.state.knobs
    several = [one.name for one in signature.parameters.values() if one.kind is one.VAR_KEYWORD]
    single = {
        one.name
        for one in signature.parameters.values()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    bound = signature.bind(*request.args, **request.kwargs)
    knobs = {}
    for name, value in changes.items():
        if name in single and name in made:
            raise ConfigError(
                f"clone({name}=...): {name} is an argument of the function and one of its knobs; "
                f"clone without it and set the clone's knob, clone.set({name}=...), or give one of "
                "them another name"
            )
        if name in made:
            knobs[name] = checked(made[name], value)
        elif name in single:
            bound.arguments[name] = value
        elif several:
            bound.arguments[several[0]] = {**bound.arguments.get(several[0], {}), name: value}
        else:
            names = ", ".join([*sorted(single), *made]) or "none"
            raise TypeError(
                f"clone() got {name}=, which is neither an argument nor a knob of the function; "
                f"it has {names}"
            )
    return bound.args, bound.kwargs, knobs


def _free_devices(run: Run) -> tuple[int, ...]:
    """Return accelerators for the clone of a run that goes on."""
    number, found = len(run.state.devices), range(len(look_at_machine().found.names))
    taken, users = run_list.least_used(found, number)
    if users or len(taken) < number:
        free, names = _free_and_users(found)
        raise ConfigError(
            f"clone(): {number} devices are needed, and {len(free)} of {len(found)} are free. "
            f"Pause or stop one of the runs that use them: {names}"
        )
    return taken


def _shared_devices(request: LaunchRequest, devices: tuple[int, ...]) -> list[str]:
    """Say that a launch which chose no accelerators gets some that other runs of the kernel use."""
    users = run_list.least_used(devices, len(devices))[1]
    if not users or request.config.devices is not None:
        return []
    free, names = _free_and_users(range(len(look_at_machine().found.names)))
    is_enough = len(free) >= len(devices)
    way = f"devices={free} takes those that are free" if is_enough else f"{len(free)} are free"
    return [f"it shares its devices with other runs of this kernel: {names}; {way}"]


def _free_and_users(found: Sequence[int]) -> tuple[list[int], str]:
    """Return the accelerators that no run of this kernel uses, and which runs use the others."""
    every = run_list.least_used(found, len(found))[1]
    used = {device for each in every for device in each.state.devices}
    return sorted({*found} - used), ", ".join(dict.fromkeys(f"{e.id} ({e.name})" for e in every))


def _keep_run_without_handle(run: Run, error: BaseException) -> None:
    """Keep the handle of a run in the list of runs, since its launch raises ``error``.

    Such a launch returns no handle, and ``last_run()`` has to find the handle. If ``error`` is a
    KeyboardInterrupt, the run is killed, and the error gets the handle as its attribute ``run``.
    """
    run_list.keep(run)
    if isinstance(error, KeyboardInterrupt):
        call = call_of(run)
        error.run = run  # type: ignore[attr-defined]
        call.kill()
        call.ended.wait(_KILL_SECONDS)
        rescued_as = call.state.rescued_as
        if rescued_as and not error.args and not call.view.is_shown:
            error.args = (RESCUED + rescued_as,)


# ---- which checkpoint a launch goes on from --------------------------------------------------


def folder_to_resume(source: object) -> str:
    """Return the folder of a run's newest state, or a folder of checkpoints after a look into it.

    Raises:
        ConfigError: there is no checkpoint, or ``source`` is something else.
    """
    if isinstance(source, Run):
        return _folder_of(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"resume={shown(source)}: expected a run, such as last_run(), or a folder of "
            "checkpoints"
        )
    folder = Path(source).expanduser().resolve()
    # Imported when it is used: it needs torch.
    start = import_module("notebook_accel.training.checkpoint.start")
    if not start.candidates(folder):
        nothing = f"there is no checkpoint of an Accelerator in it {_OF_TRAINERS}"
        what = nothing if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"resume={str(source)!r}: {what}")
    return str(folder)


def folder_for_clone(run: Run) -> str:
    """Return what a clone begins with: a checkpoint of this moment, or what an ended run left."""
    if run.state.has_ended:
        return folder_to_resume(run)
    if run.status == "paused":
        raise ConfigError(f"{run.name} is paused: run.go_on() first, or clone it without warm=True")
    folder = run.log_dir / f"warm-{secrets.token_hex(4)}"
    save_for_clone(run, folder)
    if not folder.is_dir():
        raise ConfigError(
            f"{run.name} has prepared no model yet, with which a clone could begin. A Trainer's or "
            "Lightning's training is cloned only without warm=True"
        )
    return str(folder)


def _folder_of(run: Run) -> str:
    lost = ""
    if run.state.has_ended:
        try:
            if (rescued := run.rescued) is not None:
                folder = run.log_dir / _STOPPED
                if not folder.exists():
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    rescued.write_checkpoint(folder)
                return str(folder)
        except (NotebookAccelError, ValueError, OSError) as error:
            lost = f"; what was trained when it was stopped cannot be used: {error}"
    if Path(run.state.checkpoint or "-").is_dir():
        return run.state.checkpoint
    if run.state.checkpoint:
        why = f"Its newest checkpoint, {run.state.checkpoint}, is not there any more"
    elif not run.state.has_ended:
        why = "It goes on, and has written no checkpoint: run.stop() it, or run.save()"
    else:
        why = (
            f"It wrote no checkpoint by an Accelerator {_OF_TRAINERS}, and was not stopped while "
            "it trained prepared models (a function that reads should_stop returns by itself): "
            "save_state() or resume_or_start() keeps one"
        )
    raise ConfigError(f"{run.name} left nothing to go on from. {why}{lost}")
