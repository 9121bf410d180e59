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
from notebook_accel.launch.engines import Engine, RankPlan
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.payload import PackedCall, Registry
from notebook_accel.launch.payload.cells import name_cells
from notebook_accel.launch.setup.states import apply_generators, generators
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
        request, results = new.request, Results(Registry())
        call = InlineCall(new, results=results)
        yield call
        before = dict(os.environ)
        try:
            os.environ.update({**request.environment, **_ALONE})
            with _seeded(request.config.seed), let_through():
                call.become("running", pid=os.getpid())
                failure = _call_function(request, results)
                call.state = replace(call.state, failure=failure)
                call.become("failed" if failure else "succeeded", returned=failure is None)
        except KeyboardInterrupt:
            # In the call, or held before it.
            if not call.state.has_ended:
                call.become("stopped")
            raise
        finally:
            os.environ.clear()
            os.environ.update(before)
            call.metrics.close()
            lost_notice = call.folder.save(call.state)
            if lost_notice:
                call.state = apply(wire.Notice(text=lost_notice), call.state)
            call.conclude()


class InlineCall(Call):
    """A call in the notebook's own process."""

    metrics: MetricStore

    def stacks(self, rank: int | None = None) -> str:
        if self.state.has_ended:
            return "rank 0\nthe rank has ended\n"
        return "rank 0\nit runs in the notebook's own process: its stack is that of the cell\n"

    def become(self, status: str, **fields: Any) -> None:
        ended = None if status == "running" else self.state.now()
        rank = replace(self.state.ranks[0], status=status, ended=ended, **fields)
        self.state = replace(self.state, ranks=(rank,), status=status, ended=ended)


def _call_function(request: LaunchRequest, results: Results) -> Failure | None:
    """Call the request's function, and keep its result or error; return how it failed.

    Every exception but KeyboardInterrupt is kept, and not raised; ``sys.exit(0)`` counts as
    returning None.
    """
    try:
        results.put(0, request.function(*request.args, **request.kwargs))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's function may raise anything
        code = exit_code(error) if isinstance(error, SystemExit) else 1
        if code == 0:
            results.put(0, None)
            return None
        labels = {cell.filename: cell.label for cell in request.sources}
        text = name_cells(format_error(error, caller=__file__), labels)
        text = plain_text(shorten(text))
        words = plain_text(f"{type(error).__name__}: {shorten(error_text(error))}")
        results.raised = error
        del results  # of which the error's traceback, which it now has, would be a cycle
        message = f"rank 0 failed: {words}\n\n{text}"
        return Failure(message=message, rank=0, ranks=(0,), traceback=text, exitcode=code)
    return None


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed the random generators within the block as in a rank, and restore them after it.

    Does nothing if ``seed`` is None. The states of accelerators' generators cannot be restored:
    after the block these generators start anew from the notebook's seed.
    """
    if seed is None:
        yield
        return
    before = generators()
    apply_generators(**generators(seed))
    try:
        yield
    finally:
        apply_generators(**before)
