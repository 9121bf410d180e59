"""The handle of a run, which the user holds while the run goes on and after it has ended.

handle (Run) --------> call (control/call.py): the state, and the methods that end the ranks
      \\-------------> results, function: freed with the last handle

Views and the list of runs (run_list.py) hold another :class:`Run` of the same call, which has no
results, so that they keep no large results alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_accel import wire
from notebook_accel.config.checks import as_choice, as_seconds, shown
from notebook_accel.errors import (
    ConfigError,
    LaunchError,
    NotebookAccelError,
    RunStopped,
    WorkerError,
)
from notebook_accel.launch.control.call import Call
from notebook_accel.launch.control.curves import number_steps, plot_together
from notebook_accel.launch.control.results import Results, StoredResults
from notebook_accel.launch.control.run_state import RESCUED, Failure, Progress, RunState
from notebook_accel.launch.scripts import script_of
from notebook_accel.rank.knobs import checked, plain

if TYPE_CHECKING:
    from notebook_accel.launch.launch_request import LaunchRequest

# How long results are kept; two errors end with these words.
_KEPT = (
    "The kernel that launched a run has its results and rescued models while you hold the handle "
    "that notebook_launcher gave; what was never read is in last_run() until the next launch, and "
    "of runs that raised it has those of the newest few. Keep the handle: "
    "run = notebook_launcher(...), or run = last_run() after it"
)

_HANG_LOOK_SECONDS = 0.2
_log = logging.getLogger(__name__)

E = TypeVar("E", bound=BaseException)


class Run:
    """A run: its results, logs, metrics and progress, while it runs and afterwards.

    ``run[r]`` is what rank r returned, ``len(run)`` the number of ranks. Results live as long as
    this object; if none was read, they live until the next launch.

    Attributes:
        id: name of the run's folder, by which ``find_run`` and ``attach`` find the run.
        name: name that the launch gave, else that of the function.
        config: settings of the launch.

    Example:
        The examples of the methods use this run.

        >>> from notebook_accel import Accelerator, notebook_launcher
        >>> def train(rate):
        ...     accelerator = Accelerator()
        ...     accelerator.log({"loss": rate}, step=1)
        ...     accelerator.print("done")
        ...     return accelerator.process_index
        >>> run = notebook_launcher(train, args=(0.5,), num_processes=2)
        >>> run.results
        [0, 1]
    """

    def __init__(
        self,
        call: Call,
        *,
        results: Results | None = None,
        request: LaunchRequest | None = None,
        clone: Callable[..., Run] | None = None,
    ) -> None:
        self.id: str = call.folder.id
        self.config = call.config
        self.name = call.state.name
        self._call = call
        self._request = request
        self._clone = clone
        self._newest_watch: threading.Thread | None = None
        # Those of a detached run are in its folder, for every handle.
        if results is None and call.state.detached:
            results = StoredResults(call.folder.path)
        self._results = results

    # ---- how it stands ---------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        """The current state of the run and of each of its ranks, as one immutable value."""
        return self._call.state

    @property
    def status(self) -> str:
        """Such as "starting", "running", "paused", "stopping", "succeeded", "failed", "stopped"."""
        return self.state.status

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.state.world_size

    @property
    def pids(self) -> list[int]:
        """Process id of each rank that was started, in the order of the ranks."""
        return [rank.pid for rank in self.state.ranks if rank.pid is not None]

    @property
    def progress(self) -> list[Progress]:
        """Every progress bar of every rank, including closed ones.

        ``n`` and ``total`` count items, ``rate`` is in items per second, ``elapsed`` in seconds.
        Batches of prepared loaders and optimizer steps are no bars: ``run.state.ranks[r]`` counts
        those of rank r.
        """
        shown = [field.name for field in dataclasses.fields(Progress)]
        return [
            Progress(**{name: getattr(bar, name) for name in shown})
            for rank in self.state.ranks
            for bar in rank.bars
        ]

    # ---- results ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.world_size

    def __iter__(self) -> Iterator[Any]:
        return (self[rank] for rank in range(len(self)))

    def __getitem__(self, rank: int) -> Any:
        """Wait for the end of the run, and return what a rank returned, with tensors on the CPU.

        Args:
            rank: the rank; -1 is the last rank.

        Raises:
            IndexError: the run has no such rank.
            NotebookAccelError: the results are gone, since the handle that the launch returned was
                dropped; or the run goes on in another process.
            WorkerError: a rank failed.
            LaunchError: the machines of a run in the background did not come.
            RunStopped: the run was stopped before the rank had a result.
            TimeoutError: the launch's ``timeout`` ended the run.
        """
        index = self._index_of(rank)
        self.wait()
        if self._results is None:
            raise self._about_this(
                NotebookAccelError(
                    f"the results of run {self.id} are gone, unlike its logs and metrics. {_KEPT}"
                )
            )
        if not self._results.has(index):
            for notice in self.state.notices:
                if f"what rank {index} returned is lost" in notice:
                    raise self._about_this(NotebookAccelError(notice))
            raise self._about_this(RunStopped(f"rank {rank} was stopped before it had a result"))
        return self._results.get(index)

    def _index_of(self, rank: int) -> int:
        """Return the number, from 0 on, of a rank; -1 is the last rank, and NumPy integers work.

        Raises:
            IndexError: the run has no such rank.
        """
        with contextlib.suppress(TypeError):
            if -len(self) <= operator.index(rank) < len(self):
                return operator.index(rank) % len(self)
        raise IndexError(f"rank {rank!r}: this run has the ranks 0 to {len(self) - 1}")

    @property
    def results(self) -> list[Any]:
        """List of what each rank returned, None for a rank without a result; waits for the end.

        Unlike ``run[0]``, it raises no error if the run has failed. A result that cannot be
        unpickled, or is gone, is None, too.

        Raises:
            NotebookAccelError: the run goes on in another process, and only that has its results.
        """
        self._call.wait()
        return results_now(self)

    @property
    def rescued(self) -> Any:
        """The training state of a stopped or interrupted run, else None; waits for the end.

        It has these attributes:

        - ``models``: the prepared models of the newest ``Accelerator``, unwrapped, with all their
          weights, on the CPU. None stands for a model that cannot be pickled, or was spread over
          the ranks before ``prepare``: make the model anew and load its weights.
        - ``weights``: the state dict of each model, with all weights.
        - ``optimizers``, ``schedulers``: their state dicts.
        - ``step``: number of optimizer steps of the run.
        - ``missing``: lines that name what could not be rescued.

        If the function reads ``should_stop`` or catches the interrupt, it returns by itself: its
        result is kept instead. If the handle that the launch returned is gone, for example after a
        restart of the kernel, the state comes from the run's folder, which has no models, and has
        the rest only up to 1 GB.

        Raises:
            NotebookAccelError: the state is neither in this kernel nor in the run's folder.
        """
        self._call.wait()
        if self._results is not None and self._results.has_rescued:
            return self._results.rescued()
        if not self.state.has_rescued:
            return None
        rescued = self._call.folder.load_rescued()
        if rescued is None:
            raise self._about_this(
                NotebookAccelError(f"what run {self.id} was training is gone. {_KEPT}")
            )
        return rescued

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end of the run, and raise an error if it failed.

        Args:
            timeout: seconds to wait; None for no limit. The run goes on after a wait that timed
                out.

        Returns:
            This run.

        Raises:
            WorkerError: a rank failed.
            LaunchError: the machines of a run in the background did not come.
            RunStopped: the run was stopped before any rank had a result.
            TimeoutError: the run has not ended in time, or the launch's ``timeout`` ended it.
            NotebookAccelError: the run goes on in another process, and only that can wait for it.
            ConfigError: ``timeout`` is no number of seconds.

        Example:
            >>> run.wait(timeout=60).status
            'succeeded'
        """
        if timeout is not None:
            as_seconds("timeout", timeout)
        if not self._call.wait(timeout):
            raise self._about_this(
                TimeoutError(f"the run has not ended within {timeout} s; it goes on ({self!r})")
            )
        raise_error(self)
        return self

    def _worker_error(self, failure: Failure) -> WorkerError:
        # Not part of the failure, which stays on the page and on disk: another launch changes it.
        handle = self._call.handle()
        is_logged = handle and failure.rank is not None and str(self.log_dir) in failure.message
        seen = f"\nTo see it: {handle}.logs({failure.rank})" if is_logged else ""
        error = WorkerError(
            f"{failure.message}{seen}",
            rank=failure.rank,
            ranks=failure.ranks,
            traceback=failure.traceback,
            exitcode=failure.exitcode,
            signal=failure.signal,
        )
        if self._results is not None:
            raised = None if failure.rank is None else self.state.ranks[failure.rank].failure
            cause = self._results.exception(raised.pickled if raised else None)
            error.__cause__ = cause
            # %debug opens the last frame of the traceback, which in an inline run is the person's
            # function.
            error.__traceback__ = None if cause is None else cause.__traceback__
        return error

    def _about_this(self, error: E) -> E:
        error.run = self  # type: ignore[attr-defined]
        return error

    # ---- ending it -------------------------------------------------------------------------

    def stop(self, grace: float | None = None) -> None:
        """Ask all ranks to leave the function at the same batch, and return at once.

        A rank leaves when it asks a prepared loader for that batch; a function that reads
        ``should_stop`` decides by itself. A step that is under way is let finish, however long it
        is. Ranks get a KeyboardInterrupt if none of them makes progress for three times its longest
        recent step, and for 5 seconds at least (60 in its first step); or, after ``grace`` seconds,
        if the function asks no prepared loader and does not read ``should_stop``. Once all ranks
        have left their loop or have read ``should_stop``, no rank is interrupted, so that the code
        after the loop may take its time. A second call of ``stop`` interrupts the ranks in any
        case.

        Args:
            grace: seconds that ranks which do not hear the stop get; None for the ``grace`` of the
                launch.

        Raises:
            ConfigError: ``grace`` is no number of seconds.
            OSError: the run belongs to another process, and its folder is gone.

        Example:
            >>> run.stop()
            >>> run.status  # it had ended before
            'succeeded'
        """
        if grace is not None:
            grace = as_seconds("grace", grace)
        self._call.stop(grace)

    def kill(self) -> None:
        """Kill all ranks at once, and the processes that they started.

        Raises:
            OSError: the run belongs to another process, and its folder is gone.

        Example:
            >>> run.kill()
            >>> run.status  # it had ended before
            'succeeded'
        """
        self._call.was_killed = True
        self._call.kill()

    # ---- being told ------------------------------------------------------------------------

    def add_done_callback(self, function: Callable[[Run], object]) -> None:
        """Have ``function(run)`` called in the kernel when the run has ended, however it ended.

        It is also called, once, when a hang is found; ``run.status`` is "running" then. Functions
        are called in a thread, at the end in the order in which they were added; after the end a
        function is called at once. What a function raises is logged.

        Args:
            function: gets this run.

        Raises:
            ConfigError: ``function`` is none, such as the result of one.
            NotebookAccelError: the run goes on in another process, which does not tell this one of
                the run's end.

        Example:
            >>> run.add_done_callback(lambda run: print(run.status))
            succeeded
        """
        # Told now, not in the log at the end of the night.
        if not callable(function):
            raise ConfigError(
                f"add_done_callback({shown(function)}): expected a function, without calling it"
            )
        self._call.check_waiting()
        if self._call.ended.is_set():
            return self._tell(function)
        before, context = self._newest_watch, copy_context()

        def watch() -> None:
            hangs = False
            while not self._call.ended.wait(_HANG_LOOK_SECONDS):
                hang = self.state.hang
                if not hangs and hang is not None and hang.is_certain:
                    hangs = True
                    self._tell(function)
            if before is not None:
                before.join()
            self._tell(function)

        self._newest_watch = threading.Thread(target=context.run, args=(watch,), daemon=True)
        self._newest_watch.start()
        return None

    def _tell(self, function: Callable[[Run], object]) -> None:
        try:
            function(self)
        except Exception:  # of the user's function, as in concurrent.futures
            _log.exception("a done callback of run %s failed", self.id)

    # ---- at a common step of all ranks -----------------------------------------------------

    def set(self, **values: wire.KnobValue) -> None:
        """Give knobs new values, on all ranks at the same step; return when they have them.

        A knob that the function has not made yet gets its value when it is made; a warning says
        so if it has made others. While the run is paused, the values wait until it goes on.

        Args:
            **values: the new values by the names of the knobs (``accelerator.knob``).

        Raises:
            ConfigError: the function trains, and has made no knob of that name; or the value is of
                another type, or out of range.
            TimeoutError: the ranks came to no common point within 30 seconds; nothing was changed.
            RuntimeError: the run has ended, or is being stopped.
            NotebookAccelError: the run is not this kernel's.

        Example:
            >>> run.set(lr=1e-4)  # doctest: +SKIP
        """
        made = self.state.knobs
        unknown = [name for name in values if name not in made]
        # A rank that has come to a batch or step has most likely made its knobs.
        trains = all(rank.batches or rank.steps for rank in self.state.ranks)
        if unknown and self.status != "starting" and trains:
            has = ", ".join(made) or "none"
            raise ConfigError(
                f"set({', '.join(f'{name}={values[name]!r}' for name in unknown)}): the function "
                f"has made no such knob; it has {has}. Make it by accelerator.knob(name, default)"
            )
        values = {k: checked(made[k], v) if k in made else plain(k, v) for k, v in values.items()}
        is_kept = len(unknown) == len(values) or self.status == "paused"
        asked = self._call.act(wire.Action(kind="set", values=values), stays=is_kept)
        if unknown and made and not asked.done():
            warnings.warn(
                f"the function has made no knob {', '.join(unknown)} yet (it has "
                f"{', '.join(made)}): the value is kept until it does",
                stacklevel=2,
            )
        if asked.done() or not is_kept:
            self._await(asked)

    def save(self) -> None:
        """Have all ranks save at one step; return when they have, or know that they are to.

        If the function has called ``resume_or_start``, the checkpoint is written there, else
        ``accelerator.should_save`` is True at that step. For a function that does not read it, the
        checkpoint goes into the folder ``saved`` of ``log_dir``: ``resume=run`` goes on from it.

        Raises:
            RuntimeError: as :meth:`set`, or the run is paused.
            TimeoutError, NotebookAccelError: as :meth:`set`.

        Example:
            >>> run.save()  # doctest: +SKIP
        """
        self._await(save_now(self))

    def pause(self) -> None:
        """Have all ranks wait at the same step; return when they do, or do already.

        What was prepared leaves the devices meanwhile, so that another run can use them. A pause
        does not count for the launch's ``timeout``.

        Raises:
            RuntimeError: the host has no memory for what is on the devices; the training goes on.
            TimeoutError, NotebookAccelError: as :meth:`set`.

        Example:
            >>> run.pause()  # doctest: +SKIP
        """
        self._await(self._call.act(wire.Action(kind="pause")))

    def go_on(self) -> None:
        """End a pause: the training goes on, to the bit as if there had been none.

        Raises:
            RuntimeError: the run has ended.
            NotebookAccelError: the run is not this kernel's.

        Example:
            >>> run.go_on()  # doctest: +SKIP
        """
        self._await(self._call.go_on())

    def clone(self, *, warm: bool = False, block: bool = False, **changes: Any) -> Run:
        """Launch the same function again, with other arguments or knobs.

        The clone uses the devices of this run if that has ended, else free ones. Its name is what
        was changed; ``compare(run, clone)`` draws both.

        Args:
            warm: begin with this run's training as it is at its next common step; of a run that has
                ended, with what it left (``resume=`` of ``notebook_launcher``).
            block: as for ``notebook_launcher``.
            **changes: new values by the names of the function's arguments, or else of its knobs.

        Returns:
            The run of the clone.

        Raises:
            ConfigError: a name is that of an argument and of a knob; no devices are free; or there
                is nothing to begin with. Nothing is started.
            TypeError: a name is that of neither.
            NotebookAccelError: this is not the handle that the launch returned; or the run is one
                of a session, or with ``detach=True``.
            TimeoutError, RuntimeError: as :meth:`save`, with ``warm``.

        Example:
            >>> run.clone(rate=0.25).wait().metrics[0]["value"]
            0.25
        """
        if self._clone is None:
            raise self._about_this(NotebookAccelError(_no_function(self, "clone")))
        return self._clone(self._request, self, changes, warm=warm, block=block)

    def _await(self, asked: Future[None]) -> None:
        try:
            asked.result()
        except (RuntimeError, TimeoutError) as error:
            # A cell shows errors of this package without the frames in it.
            kind = TimeoutError if isinstance(error, TimeoutError) else NotebookAccelError
            raise self._about_this(kind(f"{error} (run {self.id})")) from None

    # ---- what it left ----------------------------------------------------------------------

    @property
    def log_dir(self) -> Path:
        """Folder that has the output of each rank in a file: ``rank-0.log``, ``rank-1.log``, ..."""
        return self._call.folder.path

    def logs(self, rank: int | None = None) -> str:
        """Return everything that a rank printed, or that all ranks printed, each line labelled.

        Args:
            rank: the rank; None for all ranks, with the rank's label on each line.

        Raises:
            IndexError: the run has no such rank.
            FileNotFoundError: the run was deleted from disk.

        Example:
            >>> print(run.logs())
            [rank 0] done
        """
        return self._call.logs(None if rank is None else self._index_of(rank))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every value that was given to ``accelerator.log``.

        Each is a mapping with ``time`` (seconds since 1970), ``rank``, ``step`` (None for a value
        without a step), ``name`` and ``value``.

        Raises:
            FileNotFoundError: the run was deleted from disk.
            OSError: the file of metrics has more than 1 GB.
        """
        self._call.folder.check()
        return self._call.metrics.read()

    def to_pandas(self) -> Any:
        """Return the metrics as a pandas DataFrame.

        ``time`` is a datetime (UTC). A value that was logged without a step gets a step, as in
        :meth:`plot`: the number of earlier values of the same name from the same rank.

        Raises:
            ImportError: pandas is not installed.

        Example:
            >>> run.to_pandas()[["rank", "step", "name", "value"]].values.tolist()
            [[0, 1, 'loss', 0.5]]
        """
        try:
            import pandas as pd
        except ImportError:
            raise ImportError("run.to_pandas() needs pandas: pip install pandas") from None
        rows = number_steps(self.metrics)
        table = pd.DataFrame(rows, columns=["time", "rank", "step", "name", "value"])
        table["time"] = pd.to_datetime(table["time"], unit="s", utc=True)
        return table

    def plot(self, *names: str, backend: str | None = None) -> Any:
        """Draw metrics over their steps: in a notebook by the panel's charts, live while it trains.

        Args:
            *names: names of the metrics; without names, all metrics are drawn, in the order in
                which they were first logged. The panel's charts are the first six.
            backend: "matplotlib" draws them by that, a line per rank, as do terminals and plain
                Python. None: the panel's charts in a notebook.

        Returns:
            What a notebook shows as the charts, as the value of a cell or by ``display``. By
            matplotlib: a list of axes, one for each metric.

        Raises:
            ConfigError: no metric has one of the names, or ``backend`` is another one.
            FileNotFoundError: the run was deleted from disk.
            ImportError: matplotlib is needed, and not installed.

        Example:
            >>> axes = run.plot("loss", backend="matplotlib")
        """
        if backend is not None:
            as_choice("backend", backend, ["matplotlib"])
        charts = self._call.view.charts_of(Run(self._call), names) if backend is None else None
        if charts is not None:
            return charts
        rows = {self.name: self.metrics}
        return plot_together(rows, names, of="this run", caller="run.plot()")

    def stacks(self, rank: int | None = None) -> str:
        """Return where the Python code of each rank is now, as text.

        It works even if a rank hangs in a collective or holds the interpreter's lock.

        Args:
            rank: the rank; None for all ranks.

        Raises:
            IndexError: the run has no such rank.

        Example:
            >>> stacks = run.stacks()
        """
        if rank is not None:
            rank = self._index_of(rank)
        return self._call.stacks(rank)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the function, with all that it uses, as a script for torchrun.

        The script has the statements of the notebook's cells, up to the launch and in their order,
        that made what the function uses, and no data. What they cannot make again, such as the
        result of another run, is loaded by a line that says how to save it.

        Args:
            path: where to write the script; a leading ``~`` is expanded.

        Returns:
            The path of the script.

        Raises:
            NotebookAccelError: this is not the handle that the launch returned; or the function, a
                function that it calls, or an argument has no name in the notebook's cells.
            OSError: the file cannot be written.

        Example:
            >>> import os, tempfile
            >>> script = run.export(os.path.join(tempfile.mkdtemp(), "train.py"))
            >>> "def train(rate):" in script.read_text()
            True
        """
        request = self._request
        if request is None:
            raise self._about_this(NotebookAccelError(_no_function(self, "export")))
        target = Path(path).expanduser()
        text = script_of(
            *(request.function, request.args, request.kwargs),
            world_size=self.world_size,
            file=target.name,
            sources=request.sources,
        )
        target.write_text(text, encoding="utf-8")
        return target

    def show(self, rank: int | None = None) -> None:
        """Draw the panel of this run again, in the current cell; or show what one rank displayed.

        While a run goes on, its panel shows the figures and other rich output of one rank only,
        mostly rank 0. With ``rank``, this method shows the rich output of that rank.

        Args:
            rank: the rank whose rich output is shown; None shows the panel.

        Raises:
            IndexError: the run has no such rank.

        Example:
            >>> run.show()
        """
        view, run = self._call.view, Run(self._call)
        if rank is None:
            view.reopen(run)
        else:
            view.show_displays(run, self._index_of(rank))

    def __repr__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"<Run {self.id} of {self.name}: {self.status}, {ranks}>"


# ---- for launchers and views; methods would stand in `help(Run)`, which is for the person -------


def _no_function(run: Run, what: str) -> str:
    return (
        f"the function of run {run.id} is gone (with detach=True, once it is launched; else with "
        f"the handle that notebook_launcher gave). Launch again, and {what} from that handle"
    )


def request_of(run: Run) -> LaunchRequest | None:
    """Return the request of a run, with its function; None where that is gone."""
    return run._request


def save_now(run: Run) -> Future[None]:
    """Have all ranks save at a common step; the future says when they have."""
    return call_of(run).act(wire.Action(kind="save", folder=str(run.log_dir / "saved")))


def save_for_clone(run: Run, folder: Path) -> None:
    """Have all ranks write a checkpoint at a common step; return when it is written."""
    run._await(call_of(run).act(wire.Action(kind="clone", folder=str(folder))))


def call_of(run: Run) -> Call:
    """Return the :class:`Call` behind a handle: it has the run's state, and can end the ranks."""
    return run._call


def raise_error(run: Run) -> None:
    """Raise the error of a run that has ended, with it as ``error.run``; do nothing without one."""
    state, call = run.state, call_of(run)
    if state.failure is not None:
        is_of_start = state.failure.is_of_start
        raise run._about_this(
            LaunchError(state.failure.message) if is_of_start else run._worker_error(state.failure)
        )
    if state.status != "stopped":
        return
    # What the view's summary says is not said twice.
    kept = "" if call.view.is_shown else state.rescued_as
    kept = f"; {RESCUED}{kept}" if kept else ""
    if state.timed_out:
        text = (
            f"the run was ended after timeout={state.timeout:g} s: pass a larger timeout=, or "
            f"leave it out{kept}"
        )
        raise run._about_this(TimeoutError(text))
    if not any(rank.returned for rank in state.ranks):
        ended = "killed" if call.was_killed else "stopped"
        text = f"the run was {ended} before it had a result{kept or f' (run {run.id})'}"
        raise run._about_this(RunStopped(text))


def results_now(run: Run) -> list[Any]:
    """Return each rank's result without waiting; None if missing or impossible to unpickle."""
    results, found = run._results, [None] * len(run)
    if results is not None:
        for rank in range(len(run)):
            # What a result's classes do when they are remade.
            with contextlib.suppress(Exception, SystemExit):
                found[rank] = results.get(rank)
    return found
