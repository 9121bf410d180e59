"""Engine that calls the function in the notebook's own process, as a single rank, for debugging.

The function works on the notebook's own objects, and a debugger can step into it. A launch blocks
until the function ends. The run has results, errors and interrupts as with other engines, but its
output is not logged: the notebook shows it as usual. Only an interrupt can stop the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from notebook_accel import wire
from notebook_accel.launch.control.call import Call, NewCall
from notebook_accel.launch.control.metrics_file import MetricStore
from notebook_accel.launch.control.results import Results
from notebook_accel.launch.control.run_state import Failure, apply
from notebook_accel.launch.engines.engine import Engine, RankPlan
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.payload import PackedCall, Registry
from notebook_accel.launch.payload.cells import name_cells
from notebook_accel.launch.setup.notebook_state import apply_generators, capture
from notebook_accel.launch.text.terminal_text import plain_text
from notebook_accel.launch.worker.tracebacks import error_text, exit_code, format_error, shorten
from notebook_accel.system.interrupts import let_through

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


class InlineEngine(Engine):
    """Engine with one rank, which is the notebook's own process (``engine="inline"``)."""

    description = "engine='inline', which calls the function here and waits for it"
    unused = (*Engine.unused, "block", "timeout", "grace")
    starts_ranks = False

    def plan_ranks(self, request: LaunchRequest) -> RankPlan:
        return RankPlan.of_sizes(1)

    @contextmanager
    def begin(
        self, plan: RankPlan, packed: PackedCall | None, new: NewCall
    ) -> Iterator[InlineCall]:
        request, call = new.request, InlineCall(new)
        yield call
        variables = {**request.environment, **_ALONE}
        try:
            with _environment(variables), _seeded(request.config.seed), let_through():
                call.run(request)
        except KeyboardInterrupt:
            # In the call, or held before it.
            call.note_interrupt()
            raise
        finally:
            call.metrics.close()
            lost_notice = call.folder.save(call.state)
            if lost_notice:
                call.state = apply(wire.Notice(text=lost_notice), call.state)
            call.drop_results()
            request.view.close(call.state)
            call.ended.set()


class InlineCall(Call):
    """A call in the notebook's own process."""

    metrics: MetricStore

    def __init__(self, new: NewCall) -> None:
        self._kept = Results(Registry())
        super().__init__(new, results=self._kept)

    def stacks(self, rank: int | None = None) -> str:
        if self.state.has_ended:
            return "rank 0\nthe rank has ended\n"
        return "rank 0\nit runs in the notebook's own process: its stack is that of the cell\n"

    def run(self, request: LaunchRequest) -> None:
        """Call the request's function, keep its result or error, and update the state.

        Every exception but KeyboardInterrupt is kept as the run's error, and not raised;
        ``sys.exit(0)`` counts as returning None.
        """
        self._become("running", pid=os.getpid())
        try:
            self._kept.put(0, request.function(*request.args, **request.kwargs))
        except KeyboardInterrupt:
            raise
        except SystemExit as error:
            self._end_by(error, request, code=exit_code(error))
        except BaseException as error:  # the user's function may raise anything
            self._end_by(error, request, code=1)
        else:
            self._become("succeeded", returned=True)

    def note_interrupt(self) -> None:
        """Mark the run as stopped, unless it has ended already."""
        if not self.state.has_ended:
            self._become("stopped")

    def drop_results(self) -> None:
        """Drop this call's reference to the results, so that they are freed with the run's handle.

        The list of runs keeps the call for longer than the user needs the results.
        """
        self._kept, self.results = Results(Registry()), None

    def _become(self, status: str, **fields: Any) -> None:
        ended = None if status == "running" else self.state.now()
        rank = replace(self.state.ranks[0], status=status, ended=ended, **fields)
        self.state = replace(self.state, ranks=(rank,), status=status, ended=ended)

    def _end_by(self, error: BaseException, request: LaunchRequest, *, code: int) -> None:
        if code == 0:
            self._kept.put(0, None)
            self._become("succeeded", returned=True)
            return
        labels = {cell.filename: cell.label for cell in request.sources}
        text = name_cells(format_error(error, caller=__file__), labels)
        text = plain_text(shorten(text))
        words = plain_text(f"{type(error).__name__}: {shorten(error_text(error))}")
        message = f"rank 0 failed: {words}\n\n{text}"
        failure = Failure(message=message, rank=0, ranks=(0,), traceback=text, exitcode=code)
        self._kept.raised = error
        self._become("failed")
        self.state = replace(self.state, failure=failure)


@contextmanager
def _environment(environment: dict[str, str]) -> Iterator[None]:
    """Set these environment variables within the block, and restore the previous ones after it."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed the random generators within the block as in a rank, and restore them after it.

    Does nothing if ``seed`` is None. The states of accelerators' generators cannot be restored:
    after the block these generators start anew from the notebook's seed.
    """
    if seed is None:
        yield
        return
    before = capture()
    apply_generators(capture(seed))
    try:
        yield
    finally:
        apply_generators(before)
