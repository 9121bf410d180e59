"""The notebook's side of a session: ranks that stay alive between ``%%accelerate`` cells.

    %%accelerate --> NotebookSession.run_cell --CellCall + pushed names--> launcher.Session
                          ^                                                        |
                          +---- RankAnswer of each rank: value, assigned names <---+

A kernel has at most one. ownership.py tells which side assigned a name last;
``launch`` starts, calls and ends ranks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from notebook_accel.config import LaunchConfig, given_settings, resolve
from notebook_accel.errors import ConfigError, LaunchError, NotebookAccelError, WorkerError
from notebook_accel.launch.control.call import labelled
from notebook_accel.launch.control.run_state import Failure
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.launcher import Session, check_ranks
from notebook_accel.launch.run import Run, call_of, results_now
from notebook_accel.launch.text import used_names, wording
from notebook_accel.launch.view import View
from notebook_accel.launch.worker.streams import BreakpointError
from notebook_accel.notebook import worker
from notebook_accel.notebook.cell_setup import read_setup
from notebook_accel.notebook.clicks import can_answer, clicks_for, find_kernel
from notebook_accel.notebook.display_slot import DisplaySlot, start_thread
from notebook_accel.notebook.ownership import Ownership, Push, names_used
from notebook_accel.notebook.rank_displays import say, show_values
from notebook_accel.notebook.tracebacks import cell_sources, debug
from notebook_accel.notebook.views import choose_view
from notebook_accel.system.processes import describe_exit

_DEBUG = "`%accelerate debug` looks into its frames"
_RESTART = "`%accelerate restart` starts new ranks; the names of the old ones are lost"
_NEW_RANKS = "The next cell gets new ranks, since this one's device fails for good"
# Between two looks at whether the person has interrupted; as in launch/control/call.py.
_SLICE_SECONDS = 0.05
_PLAIN = "text/plain"


class NotebookSession:
    """Ranks that stay alive between the cells of a notebook, and the record of their variables.

    Attributes:
        names: the variables that any rank has.
        cells: source of each cell that all ranks have run to its end, by execution number.
        left_out: for each other cell, why a script must leave it out.
        failure: of the newest call that failed; None if none has.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        config: LaunchConfig,
        notices: Sequence[str] = (),
        *,
        view: View | None = None,
    ) -> None:
        """Start the ranks; ``notices`` show with the first call, ``view`` tells of a slow start.

        Raises:
            ConfigError: the engine's ranks cannot stay alive, or there are more than accelerators.
            LaunchError: the ranks could not be started.
        """
        self.config = config
        self.names: frozenset[str] = frozenset(used_names.PROVIDED)
        self.cells: dict[int, str] = {}
        self.left_out: dict[int, str] = {}
        self._shell: Any = shell
        self._owners = Ownership(shell.user_ns, shell.user_ns_hidden)
        self._owners.note_session_assigned(used_names.PROVIDED)
        self._notices = tuple(notices)
        self.failure: Failure | None = None
        # How each call has ended is noted before the next one is made, so that nothing depends on
        # who waited for it: which call was noted last, and what was sent since, with which names.
        self._noted: Run | None = None
        # What the ranks repeated of the notebook's settings of libraries, by key.
        self._setup: dict[str, bytes] = {}
        self._sent: tuple[worker.NamesCall | None, frozenset[str]] = (None, frozenset())
        # Whether all ranks had a process group that they have left since: the next cell or function
        # call makes it anew. Whether they have names that they could not tell: a call raised.
        self._has_lost_group = False
        self._has_unreported_names = False
        # What went along with a call that not all ranks have returned from, and its number.
        self._unsure: tuple[int, frozenset[str]] = (0, frozenset())
        # Waits for a cell in the background, and then shows its values.
        self._background: threading.Thread | None = None
        request = LaunchRequest(config=config, view=view or View(), name="the session")
        self.session = Session(request)
        self._shell.events.register("post_run_cell", self._after_cell)
        self._shell.Completer.custom_matchers.append(self._complete)

    @property
    def world_size(self) -> int:
        return self.session.world_size

    @property
    def is_usable(self) -> bool:
        return self.session.status in ("starting", "ready", "busy")

    # ---- cells -----------------------------------------------------------------------------

    def run_cell(
        self,
        request: worker.CellCall,
        *,
        code: str,
        number: int,
        push: tuple[str, ...] = (),
        pushes_used: bool = True,
        in_background: bool = False,
    ) -> Run:
        """Run a cell on the ranks, show the value of its last expression, and pull names.

        Args:
            request: the cell, to which the names that it uses are added.
            code: its text as plain Python; ``number`` is that of its execution.
            push: names copied even if the session assigned them last.
            pushes_used: whether variables that the cell uses are pushed too.

        Raises:
            ConfigError: there is no such rank, or no such name to push.
            LaunchError: a value cannot be pickled, or a rank has ended.
            NotebookAccelError: a name to pull does not exist.
            WorkerError, RunStopped: as a launch; after a ``breakpoint()``, once the
                user has left the debugger.
        """
        self._check_ranks(request.ranks or ())
        self._await_turn()
        found = used_names.names_of(code)
        request.uses_accelerator = "accelerator" in found.used
        request.imports = used_names.submodules(found.dotted, self._shell.user_ns)
        request.renews_group = self._has_lost_group
        planned = self._plan_push(found.used if pushes_used else (), push)
        plain = used_names.without_watcher(request.text)
        self._owners.note_uses(self._shell.transform_cell(plain))
        self.left_out[number] = "did not end well"
        block = not in_background
        steps, lost = read_setup(self._shell)
        try:
            run = self._begin(
                request,
                planned,
                LaunchRequest(
                    config=self.config,
                    view=choose_view("auto", waits=block, is_cell=block),
                    sources=[request.source, *cell_sources(self._shell)],
                    setup=steps,
                    notices=lost,
                    block=block,
                    asked=request.ranks,
                ),
            )
        except WorkerError as error:
            if isinstance(error.__cause__, BreakpointError) and can_answer(find_kernel()):
                debug(self.ask_debuggers, error.rank, lambda: self.failure)
            raise
        conclude = partial(self._conclude, run, request, number, found.certain)
        if in_background:
            self._follow_in_background(run, conclude)
        else:
            conclude(None)
        return run

    def _follow_in_background(
        self, run: Run, conclude: Callable[[DisplaySlot | None], None]
    ) -> None:
        """Wait for the run in a thread, which calls ``conclude`` with a slot for the values."""
        # What a thread displays appears anywhere, but what fills a slot.
        slot, below = DisplaySlot(), DisplaySlot()
        for one in (slot, below):
            one.clear()

        def follow() -> None:
            while not call_of(run).ended.wait(1.0):
                continue
            lines = []
            if run.state.failure is not None:
                hint = _DEBUG if self.is_usable else f"The session is over: {_RESTART}"
                lines.append(f"{run.name} failed. {hint}")
            try:
                conclude(slot)
            except Exception as error:  # nobody else would be told
                lines.append(f"{run.name}: {type(error).__name__}: {error}")
            if lines:
                below.show({_PLAIN: "\n".join(lines)})

        self._background = start_thread(follow, name="notebook-accel-cell")

    def call(self, request: LaunchRequest) -> Run:
        """Call a function whose globals are the session's variables; raises as a launch."""
        self._await_turn()
        function = request.function
        name = getattr(function, "__name__", "")
        is_ours = self._owners.is_ours(name) and self._shell.user_ns[name] is function
        # As of a cell that calls the function: what it and its arguments use of the notebook goes
        # along. What cannot travel is told when the call itself is packed.
        mentions = frozenset([name]) if is_ours else frozenset()
        with suppress(Exception):
            mentions |= names_used((function, request.args, request.kwargs))
        called = worker.FunctionCall(
            function=function,
            args=tuple(request.args),
            kwargs=dict(request.kwargs),
            renews_group=self._has_lost_group,
        )
        return self._begin(called, self._plan_push(mentions), request)

    def _begin(self, called: worker.NamesCall, push: Push, request: LaunchRequest) -> Run:
        """Call the ranks and send variables along; the function in ``request`` is not used."""
        called.fills = push.fills
        called.uses_accelerator |= "accelerator" in push.reached
        self._owners.note_call()
        self._sent = called, frozenset(push.values.keys() - push.fills)
        try:
            return self.session.call(
                replace(
                    request,
                    function=called,
                    args=(),
                    kwargs=push.values,
                    setup=[one for one in request.setup if self._setup.get(one.key) != one.body],
                    notices=(*self._notices, *request.notices, *push.lines),
                    advise=False,
                    brings_globals=False,
                    keeps_error=True,
                )
            )
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, NotebookAccelError) and not self.is_usable:
                error.hint = f"The session is over: {_RESTART}"
            elif isinstance(error, WorkerError) and error.traceback:
                error.hint = _DEBUG
                if wording.LASTING_ERROR in error.traceback:
                    error.hint += f". {_NEW_RANKS}"
                elif "Cell In[" not in error.traceback:  # an earlier cell may have broken the rank
                    error.hint += f". If each cell fails so: {_RESTART}"
            raise
        finally:
            if self.session.newest_call is not self._noted:  # it was sent
                self._notices = ()
                self._setup = {one.key: one.body for one in request.setup}
                self._owners.note_pushed(push)

    def _conclude(
        self,
        run: Run,
        request: worker.CellCall,
        number: int,
        assigned: Iterable[str],
        slot: DisplaySlot | None,
    ) -> None:
        """Record a cell's assignments, show its values, and pull its names if it has not failed.

        ``assigned``: ranks miss a name that was assigned the very same object again. No slot is the
        running cell. NotebookAccelError if a name to pull does not exist.
        """
        outcomes: list[worker.RankAnswer | None] = results_now(run)
        if all(rank.returned for rank in run.state.ranks):
            self._owners.note_session_assigned(assigned)
            if request.ranks is None:
                self.cells[number] = request.text
                del self.left_out[number]
            else:
                self.left_out[number] = "ran with --ranks"
        self._take(outcomes)
        show_values([None if one is None else one.value for one in outcomes], slot)
        asked = outcomes if request.pull_from is None else [outcomes[request.pull_from]]
        if run.state.failure is None and None not in asked:
            self._assign(request.pull, outcomes, request.pull_from)

    def _take(self, outcomes: Iterable[worker.RankAnswer | None]) -> None:
        """Record the ranks' variables and assignments; nothing if one has not answered (None)."""
        answers = [one for one in outcomes if one is not None]
        if len(answers) < len(self.session.processes):
            return
        self._owners.note_session_assigned({name for one in answers for name in one.assigned})
        names = [one.names.union(used_names.PROVIDED) for one in answers]
        self.names = frozenset[str]().union(*names)
        self._owners.keep_only(names)
        self._has_unreported_names = False
        (call, pushed), self._unsure = self._unsure, (0, frozenset())
        if any(answer.last_push < call for answer in answers):
            self._owners.push_again(pushed)

    def _plan_push(self, used: Iterable[str], forced: Sequence[str] = ()) -> Push:
        missing = [name for name in forced if not self._owners.is_ours(name)]
        if missing:
            quoted = ", ".join(f"`{name}`" for name in missing)
            raise ConfigError(
                f"the notebook has no {quoted} that could be pushed: assign it in a cell of the "
                "notebook first (what was pulled or made in the session stays the session's)"
            )
        return self._owners.plan_push(used, forced)

    def _check_ranks(self, ranks: Iterable[int]) -> None:
        absent = sorted(rank for rank in ranks if not 0 <= rank < self.world_size)
        if absent:
            raise ConfigError(
                f"there is no rank {absent[0]}: the session has the ranks 0 to "
                f"{self.world_size - 1}"
            )

    def await_calls(self) -> None:
        """Wait for a call in the background; an interrupt ends the wait only, the call goes on."""
        call = self.session.newest_call
        if call is not None and self._is_going_on(call):
            slot = DisplaySlot()
            clicks = clicks_for(find_kernel())
            try:
                # That call's panel has a Stop, which works by the time that the line is seen.
                clicks.pump()
                slot.show({_PLAIN: f"waits for {call.name}, which runs in the background"})
                while self._is_going_on(call):
                    clicks.pump()
                    time.sleep(_SLICE_SECONDS)
            finally:
                clicks.stop_pumping()
                slot.clear()

    def _await_turn(self) -> None:
        """Wait until the ranks are free, record the newest call; LaunchError if one has ended."""
        self.await_calls()
        self._note_end()
        if not self.is_usable:
            raise LaunchError(f"{self._how_it_ended()}. {_RESTART}")
        if self._has_unreported_names:
            self._take(self._ask(worker.NamesCall()))

    def _note_end(self) -> None:
        """Record once how the newest call has ended, before the next one is made."""
        run, (called, pushed) = self.session.newest_call, self._sent
        if run is None or run is self._noted:
            return
        self._noted = run
        if called is not None and run.state.failure is not None:
            self.failure = run.state.failure
        if run.state.ended_well:
            if called is not None and called.renews_group:
                self._has_lost_group = False
            return
        # A call that had no group, since it asked for names alone or raised before it made the
        # group anew, says nothing of the one before.
        if all(rank.made_group for rank in run.state.ranks):
            self._has_lost_group = True
        self._has_unreported_names = True
        if pushed:
            self._unsure = call_of(run).number, pushed

    def _is_going_on(self, call: Run) -> bool:
        """Also true while its values have yet to be shown."""
        is_followed = self._background is not None and self._background.is_alive()
        return is_followed or not call_of(call).ended.is_set()

    def _ask(
        self, request: worker.NamesCall | worker.DebugCall, names: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Return each rank's answer to a request, in a call that ``runs()`` does not list."""
        self._sent = None, frozenset()
        return self.session.ask(request, names or {})

    def _how_it_ended(self) -> str:
        for process in self.session.processes:
            # Of ranks whose agent was lost nobody knows either.
            if process.signal is not None or process.exitcode is not None:
                return f"rank {process.rank} {describe_exit(process.exitcode, process.signal)}"
        return "the ranks of the session have ended"

    @property
    def lost_with_device(self) -> str:
        self.await_calls()
        self._note_end()
        if self.failure is None or wording.LASTING_ERROR not in self.failure.traceback:
            return ""
        # What the notebook has of them is pushed again.
        lost = (name for name in sorted(self.names) if not self._owners.is_ours(name))
        names = ", ".join(f"`{name}`" for name in lost if name not in used_names.PROVIDED)
        return (
            f"new ranks: the device of rank {self.failure.rank} failed for good, and what the "
            f"session had is gone: {names or 'no names'}"
        )

    # ---- names -----------------------------------------------------------------------------

    def pull(self, names: Sequence[str], *, rank: int | None = 0) -> None:
        """Copy ranks' variables here, tensors on the CPU; ``rank=None`` lists all ranks' values.

        Raises:
            ConfigError: there is no such rank.
            NotebookAccelError: the rank has no such name, or with ``rank=None`` no rank has it.
            WorkerError: a value cannot be pickled.
        """
        self._check_ranks([] if rank is None else [rank])
        self._await_turn()
        outcomes: list[worker.RankAnswer] = self._ask(
            worker.NamesCall(pull=tuple(names), pull_from=rank)
        )
        self._take(outcomes)
        self._assign(names, outcomes, rank)

    def push(self, names: Sequence[str]) -> None:
        """Copy variables of the notebook to all ranks, even if the session assigned them last.

        Raises:
            ConfigError: the notebook has no such name.
            LaunchError: a value cannot be pickled.
        """
        self._await_turn()
        push = self._plan_push((), names)
        self._take(self._ask(worker.NamesCall(), push.values))
        self._owners.note_pushed(push)

    def _assign(
        self, names: Sequence[str], outcomes: Sequence[worker.RankAnswer | None], rank: int | None
    ) -> None:
        """Assign values as ``pull`` says; None for a rank that did not answer, or lacks a name."""
        answers = {number: one for number, one in enumerate(outcomes) if one is not None}
        asked = answers if rank is None else {rank: answers[rank]}
        for name in names:
            if any(name in one.pulled for one in asked.values()):
                continue
            having = [number for number, one in answers.items() if name in one.names]
            if not having:
                raise NotebookAccelError(
                    f"the session has no `{name}` that could be pulled: %accelerate status lists "
                    "its names"
                )
            raise NotebookAccelError(
                f"rank {rank} has no `{name}`, and {wording.rank_list(having)} "
                f"{'has' if len(having) == 1 else 'have'}: `%accelerate pull --rank {having[0]} "
                f"{name}`, or `--each-rank` for a list with None where a rank has none"
            )
        for name in names:
            values = [one.pulled.get(name) for one in asked.values()]
            self._shell.user_ns[name] = values if rank is None else values[0]
            self._owners.note_pulled(name)

    # ---- the notebook's own cells, which see no name of the session: ``model.eval()`` is a
    # NameError there.

    def _complete(self, text: str) -> list[str]:
        return sorted(name for name in self.names if text and name.startswith(text))

    def _after_cell(self, result: Any) -> None:
        """Note what a cell of the notebook assigned; hint at a name that the session has."""
        text = getattr(getattr(result, "info", None), "raw_cell", None) or ""
        missing = getattr(result.error_in_exec, "name", None)
        if (
            isinstance(result.error_in_exec, NameError)
            and missing in self.names
            and missing not in self._shell.user_ns
        ):
            where = f"lives in the session: `%accelerate pull {missing}`"
            if missing in used_names.PROVIDED:
                # Each rank has its own, and an accelerator may not have been made yet.
                where = "is there in the cells of `%%accelerate`"
            sys.stderr.write(f"`{missing}` {where}\n")
        is_the_notebooks = result.success and not text.lstrip().startswith("%%accelerate")
        names = used_names.CellNames()
        if is_the_notebooks:
            names = used_names.names_of(
                self._shell.transform_cell(used_names.without_watcher(text))
            )
        self._owners.note_assigned(names.assigned)

    # ---- the session -----------------------------------------------------------------------

    def describe(self) -> str:
        status = self.session.status
        lines = [f"session of {num_ranks(self.world_size)}: {status}"]
        for one in self.session.processes:
            how = "busy" if (status, one.status) == ("busy", "ready") else one.status
            lines.append(f"rank {one.rank}  pid {one.pid}  {how}")
        names = sorted(self.names)
        lines.append(f"names: {', '.join(names)}")
        lines.append(f"logs: {self.session.folder.path}")
        return "\n".join(lines)

    def logs(self, rank: int | None = None) -> str:
        """Return what a rank printed (None: all, labelled); ConfigError for no such rank."""
        if rank is not None:
            self._check_ranks([rank])
            return self.session.folder.read_log(rank)
        ranks = range(self.world_size)
        return "".join(labelled(number, self.session.folder.read_log(number)) for number in ranks)

    def stacks(self, rank: int | None = None) -> str:
        """Return a rank's stacks (None: all); ConfigError if there is no such rank."""
        self._check_ranks([] if rank is None else [rank])
        return self.session.stacks(rank)

    def ask_debuggers(self, request: worker.DebugCall) -> list[worker.DebugAnswer | None]:
        self._await_turn()
        return self._ask(request)

    def end(self) -> None:
        """A call in the background has ``config.grace`` seconds to end by itself."""
        self._shell.events.unregister("post_run_cell", self._after_cell)
        self._shell.Completer.custom_matchers.remove(self._complete)
        self.session.close(self.config.grace)


def num_ranks(world_size: int) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{world_size} rank{'' if world_size == 1 else 's'}"


# ---- the one session of this kernel -------------------------------------------------------

_OPTIONS = {"num_processes": "-n", "mixed_precision": "--mixed-precision"}

_session: NotebookSession | None = None


class StartingLine(View):
    """The view of a session's start: a line that says that it starts, then how long that took."""

    def __init__(self) -> None:
        self._slot = DisplaySlot()
        self._began = time.monotonic()

    def launch_is_slow(self, name: str, importing: str = "") -> None:
        what = f": importing {importing}" if importing else ""
        say(f"{name} starts, which takes some seconds{what}", self._slot)

    def waits_for_machines(self, text: str) -> None:
        say(text, self._slot)

    def launch_failed(self) -> None:
        if self._slot.is_placed:
            say("the session was not started", self._slot)

    def conclude(self, world_size: int) -> None:
        seconds = wording.span(time.monotonic() - self._began)
        started = f"session of {num_ranks(world_size)} started in {seconds}"
        say(f"{started}; %accelerate stop ends it", self._slot)


def current_session() -> NotebookSession | None:
    """Return the kernel's session, also with dead ranks: a new one would lack its variables."""
    return _session


def start_session(
    shell: InteractiveShell, config: LaunchConfig, notices: Sequence[str] = ()
) -> NotebookSession:
    """Start the session of this kernel.

    Raises:
        ConfigError: there is a session already, or its ranks cannot be started with these settings.
        LaunchError: the ranks could not be started.
    """
    global _session
    running = current_session()
    if running is not None:
        raise ConfigError(
            f"there is a session of {num_ranks(running.world_size)}: `%accelerate restart` starts "
            "another one in its place"
        )
    line = StartingLine()
    try:
        _session = NotebookSession(shell, config, notices, view=line)
    except BaseException:
        line.launch_failed()
        raise
    line.conclude(_session.world_size)
    return _session


def restart_session(
    shell: InteractiveShell, config: LaunchConfig, notices: Sequence[str] = ()
) -> NotebookSession:
    """End the session, if there is one, and start a new one; the old one survives a ConfigError."""
    check_ranks(config)
    end_session()
    return start_session(shell, config, notices)


def session_for(
    shell: InteractiveShell,
    arguments: Mapping[str, Any],
    config: LaunchConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> NotebookSession:
    """Return the session of this kernel; start one if there is none, or if a device is lost.

    Environment and config file count only for a session that is started now.

    Raises:
        ConfigError: the session was started with other settings, or cannot be started with these.
        LaunchError: the ranks could not be started.
    """
    running = current_session()
    if running is None:
        return start_session(shell, *resolve(arguments, config))
    asked, _ = given_settings(arguments, config)
    given = {name: value for name, value in asked.items() if value is not None}
    has = replace(running.config, num_processes=running.world_size)
    wanted = LaunchConfig(**given)
    if other := [name for name in given if getattr(wanted, name) != getattr(has, name)]:
        command = "%accelerate stop"
        if _OPTIONS.keys() >= set(other):
            options = (f"{_OPTIONS[name]} {getattr(wanted, name)}" for name in other)
            command = " ".join(["%accelerate restart", *options])
        # Texts of variables may be secrets, and a notebook is saved with its errors.
        held = ", ".join(
            f"env of {', '.join(has.env or ()) or 'nothing'}"
            if name == "env"
            else f"{name}={getattr(has, name)!r}"
            for name in other
        )
        raise ConfigError(
            f"the session was started with {held}: `{command}` ends it, with all its names, for "
            "one with other settings; `%%accelerate --fresh` runs a cell in ranks of its own"
        )
    lost = running.lost_with_device
    return restart_session(shell, running.config, [lost]) if lost else running


def end_session() -> bool:
    """Return whether there was one."""
    global _session
    ending, _session = _session, None
    if ending is None:
        return False
    ending.end()
    return True
