"""Joins configuration, payload, engine and view into a run; the only place that does."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from notebook_accel.launch import payload, preflight, wire
from notebook_accel.launch.control import state
from notebook_accel.launch.control.environment import num_threads_of, rank_environment
from notebook_accel.launch.control.export import script_of
from notebook_accel.launch.control.interrupts import held
from notebook_accel.launch.control.metrics_file import MetricStore
from notebook_accel.launch.control.run_folder import RunFolder
from notebook_accel.launch.control.terminal_text import one_line
from notebook_accel.launch.engines import engine_named
from notebook_accel.launch.engines.base import Job, Opening, PreparedCall, Start, begin_call
from notebook_accel.launch.payload import notebook_state
from notebook_accel.launch.run import Run
from notebook_accel.launch.transport.packet import pack
from notebook_accel.launch.view import GuardedView, View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from notebook_accel.config import LaunchConfig
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.engines.base import RankPlan
    from notebook_accel.launch.payload import CellSource

__all__ = ["Session", "launch"]

_WAIT_SECONDS = 0.05
_KILL_SECONDS = 10.0
_MAX_NAME = 60


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    config: LaunchConfig,
    view: View,
    sources: Sequence[CellSource] = (),
    block: bool = True,
    timeout: float | None = None,
    imports: Sequence[str] = (),
    notices: Sequence[str] = (),
    advise: bool = True,
) -> Run:
    """Call ``function(*args, **kwargs)`` on every rank of a new run.

    Args:
        function: what each rank calls.
        args: its positional arguments.
        kwargs: its keyword arguments.
        config: how to launch.
        view: shows the run.
        sources: the cells from which code comes.
        block: wait for the end, and raise the run's error.
        timeout: seconds after which the run is ended.
        imports: modules that each rank imports first.
        notices: lines for the person that are known already.
        advise: say at the end what a training function seems to have forgotten.

    Raises:
        ConfigError: an argument makes no sense, or there are more ranks than accelerators.
        LaunchError: the run could not start.
        WorkerError, RunStopped, TimeoutError: as ``Run.wait``, with ``block``.
    """
    view = GuardedView(view)
    preflight.check_wait(block=block, timeout=timeout)
    preflight.check_call(function, args, kwargs)
    job = Job(
        function=function,
        args=tuple(args),
        kwargs=dict(kwargs or {}),
        name=_name_of(function),
        config=config,
        environment=rank_environment(config),
        sources=tuple(sources),
        view=view,
        timeout=timeout,
        imports=tuple(imports),
        advise=advise,
    )
    try:
        run = _open(job, list(notices))
    except BaseException:
        view.abandon()
        raise
    if block:
        with _kept_for_its_error(run):
            _wait(run, view)
    return run


class Session:
    """Ranks that stay between calls: each call finds in them what the ones before it left.

    Its ranks end with :meth:`close`, or with this process. After a call that did not return on
    every rank the ranks destroy their process group; the next one makes it anew.
    """

    def __init__(
        self,
        *,
        config: LaunchConfig,
        view: View | None = None,
        name: str = "session",
        imports: Sequence[str] = (),
    ) -> None:
        """Start the ranks. Calls may be sent at once; they begin when the ranks are ready.

        Args:
            config: how to launch.
            view: shows that the ranks come, if that takes long; each call has a view of its own.
            name: what the person calls the session.
            imports: modules that each rank imports first.

        Raises:
            ConfigError: the engine has no ranks that could stay, or there are more ranks than
                accelerators.
            LaunchError: the ranks could not be started.
        """
        preflight.check_platform()
        start = Start(
            name=name,
            config=config,
            environment=rank_environment(config),
            view=GuardedView(view or View()),
            imports=tuple(imports),
        )
        engine = engine_named(config.engine)
        engine.warm_up(start)
        plan = engine.plan_ranks(start)
        preflight.check_machine(config, plan.world_size)
        self._start = start
        self._folder = RunFolder.make()
        with contextlib.ExitStack() as undo:
            undo.callback(self._folder.remove)
            self._folder.make_logs(plan.world_size)
            message = _launch_message(start, plan, run=self._folder.id)
            # An interrupt that came inside of held() is raised at its end: the ranks are there
            # then, and nobody would have the session.
            with held():
                self._pool = engine.start(start, plan, message, log_dir=self._folder.path)
                undo.callback(self.kill)
                self._pool.start()
            undo.pop_all()

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        view: View,
        sources: Sequence[CellSource] = (),
        block: bool = True,
        timeout: float | None = None,
        notices: Sequence[str] = (),
    ) -> Run:
        """Call ``function(*args, **kwargs)`` on every rank.

        The arguments are those of :func:`launch`.

        Raises:
            LaunchError: another call goes on, or a rank has ended; the message says what to do.
            WorkerError, RunStopped, TimeoutError: as ``Run.wait``, with ``block``.
        """
        view = GuardedView(view)
        preflight.check_wait(block=block, timeout=timeout)
        preflight.check_call(function, args, kwargs)
        self._pool.check_free()
        job = Job(
            function=function,
            args=tuple(args),
            kwargs=dict(kwargs or {}),
            name=_name_of(function),
            config=self._start.config,
            environment=self._start.environment,
            sources=tuple(sources),
            view=view,
            timeout=timeout,
            advise=False,
        )
        world_size = len(self._pool.processes)
        with _opening(job, _pack(job), world_size, notices, session=self._folder) as opening:
            assert opening.call is not None
            begin_call(self._pool, job, opening, opening.call, last=False)
        if block:
            with _kept_for_its_error(opening.run):
                _wait(opening.run, view)
        return opening.run

    @property
    def status(self) -> str:
        """ "starting", "ready", "busy" (in a call), "broken" (a rank has ended) or "ended"."""
        if self._pool.ended.is_set():
            return "ended"
        processes = {process.status for process in self._pool.processes}
        if "ended" in processes:
            return "broken"
        if self._pool.is_in_call:
            return "busy"
        return "starting" if "starting" in processes else "ready"

    @property
    def processes(self) -> tuple[state.ProcessState, ...]:
        """What is known of each rank's process, in the order of the ranks."""
        return self._pool.processes

    @property
    def log_dir(self) -> Path:
        """Folder with a file of all output for each rank."""
        return self._folder.path

    def stacks(self, rank: int | None = None) -> str:
        """Where each rank's Python stands now."""
        return "\n".join(f"rank {rank}\n{text}" for rank, text in self._pool.stacks(rank))

    def close(self, grace: float = 10.0) -> None:
        """End the ranks, after the call that they are in; at once after ``grace`` seconds."""
        self._pool.shut_down()
        if not self._pool.ended.wait(grace):
            self.kill()

    def kill(self) -> None:
        """End the ranks and all that they started, now."""
        self._pool.kill()
        self._pool.ended.wait(_KILL_SECONDS)


def _open(job: Job, notices: list[str]) -> Run:
    engine = engine_named(job.config.engine)
    if engine.needs_payload:
        preflight.check_platform()
    packed = _pack(job) if engine.needs_payload else None
    engine.warm_up(job)
    plan = engine.plan_ranks(job)
    preflight.check_machine(job.config, plan.world_size)
    with _opening(job, packed, plan.world_size, (*notices, *plan.notices)) as opening:
        message = None
        if packed is not None:
            message = _launch_message(job, plan, run=opening.folder.id)
        engine.open(job, replace(opening, plan=plan, launch=message))
    return opening.run


@contextlib.contextmanager
def _opening(
    job: Job,
    packed: payload.PackedCall | None,
    world_size: int,
    notices: Sequence[str],
    session: RunFolder | None = None,
) -> Iterator[Opening]:
    """A run with its folder, for a block that begins it; where it does not, nothing is left.

    Args:
        job: what is called.
        packed: it, packed; None where nothing is sent.
        world_size: number of ranks.
        notices: lines for the person that are known already.
        session: the folder of the session whose ranks are called.
    """
    folder = RunFolder.make(remove_old=session is None)
    with contextlib.ExitStack() as undo:
        undo.callback(folder.remove)
        if session is not None:
            folder.link_logs(session, world_size)
        metrics = MetricStore(folder.path)
        undo.callback(metrics.close)
        run = Run(
            name=job.name,
            config=job.config,
            folder=folder,
            metrics=metrics,
            view=job.view,
            source=partial(_script, job, world_size),
        )
        call = None
        if packed is not None:
            notices = [*packed.notices, *notices]
            call = _prepare_call(packed, advise=job.advise)
        first = state.starting(
            run=folder.id,
            name=job.name,
            world_size=world_size,
            started=time.time(),
            notices=tuple(notices),
            session="" if session is None else session.id,
        )
        opening = Opening(run=run, state=first, folder=folder, metrics=metrics, call=call)
        try:
            with _kept_for_its_error(run):
                yield opening
        finally:
            if run.has_begun:
                undo.pop_all()
            for fd in call.fds if call is not None else ():
                os.close(fd)


def _name_of(function: Callable[..., Any]) -> str:
    """What lines for the person call the function: whoever makes functions names them freely."""
    return one_line(str(getattr(function, "__name__", type(function).__name__)), _MAX_NAME)


@contextlib.contextmanager
def _kept_for_its_error(run: Run) -> Iterator[None]:
    """Where the launch raises, nobody is given the handle: the list of runs keeps it.

    A KeyboardInterrupt that leaves the block finds the run ended, and knows it as ``run``.
    """
    try:
        yield
    except BaseException as error:
        if run.has_begun:
            run.keep()
            if isinstance(error, KeyboardInterrupt):
                error.run = run  # type: ignore[attr-defined]
                run.kill()
                run.conductor.ended.wait(_KILL_SECONDS)
        raise


def _script(job: Job, world_size: int, file: str) -> str:
    return script_of(
        job.function,
        job.args,
        job.kwargs,
        world_size=world_size,
        file=file,
        sources=job.sources,
    )


def _pack(job: Job) -> payload.PackedCall:
    return payload.pack_call(job.function, job.args, job.kwargs, sources=job.sources)


def _launch_message(job: Start, plan: RankPlan, *, run: str) -> wire.Launch:
    """What starts the rank processes of a run; the engine adds each agent's ranks and folder."""
    num_threads = num_threads_of(job.environment, plan.world_size)
    of_engine = {"OMP_NUM_THREADS": str(num_threads), **plan.environment}
    return wire.Launch(
        run=run,
        world_size=plan.world_size,
        ranks=(),
        environment=rank_environment(job.config, of_engine=of_engine),
        directory=os.getcwd(),
        path=tuple(sys.path),
        log_dir=None,
        num_threads=num_threads,
        imports=job.imports,
        notebook=notebook_state.capture(job.config.seed).to_bytes(),
    )


def _prepare_call(packed: payload.PackedCall, *, advise: bool) -> PreparedCall:
    """What a call sends; whoever gets it closes its descriptors."""
    packet, fds = pack(packed.packed)
    return PreparedCall(
        payload=packet,
        fds=fds,
        registry=packed.registry,
        closing_notices=lambda last: _advice(last, packed) if advise else [],
    )


def _advice(last: RunState, packed: payload.PackedCall) -> list[str]:
    """Lines that only the end of a run can tell."""
    lines = _lost_models(last, packed)
    told = [rank.made_group for rank in last.ranks if rank.made_group is not None]
    has_succeeded = all(rank.returned for rank in last.ranks)
    # Of a function that has nothing to train, copies are what was asked for.
    if packed.uses_torch and last.world_size > 1 and has_succeeded and not any(told):
        alone = (
            f"no rank made a process group: {last.world_size} copies of {last.name} ran on their "
            "own (make an Accelerator in it, or call torch.distributed.init_process_group)"
        )
        lines.append(alone)
    return lines


def _lost_models(last: RunState, packed: payload.PackedCall) -> list[str]:
    """A model that the function trained stays in the ranks, unless it is returned."""
    has_nothing = all(rank.returned and rank.returned_none for rank in last.ranks)
    if not packed.models or not has_nothing:
        return []
    names = ", ".join(f"`{name}`" for name in packed.models)
    lost = (
        f"{last.name} used {names} of the notebook and returned None: the notebook's own stays as "
        "it was; return what you want to keep"
    )
    return [lost]


def _wait(run: Run, view: View) -> None:
    """Wait for a run as its cell does: interrupts go to the ranks, and the cell ends with them."""
    ended = run.conductor.ended
    told = 0
    with held(patience=None) as presses:
        while not ended.wait(_WAIT_SECONDS):
            view.poll()
            if told < presses.count:
                told += 1
                run.conductor.press(told)
        view.print_end()
    run.raise_error()
