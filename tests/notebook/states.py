"""States of runs, made from the messages that ranks send."""

import math
from collections.abc import Iterable
from dataclasses import replace

from notebook_accel import wire
from notebook_accel.launch.control.curves import Curve
from notebook_accel.launch.control.run_state import Failure, RunState, apply, starting


def after(state: RunState, *messages: wire.Message) -> RunState:
    for message in messages:
        state = apply(message, state)
    return state


def logged(rank: int, values: dict[str, float], step: int | None = None) -> wire.Metrics:
    return wire.Metrics(metrics=(wire.Metric(rank=rank, values=values, step=step),))


def running(num_ranks: int = 2, *, name: str = "train") -> RunState:
    state = starting(run="id", name=name, world_size=num_ranks, started=1000.0)
    return after(state, *(wire.CallStarted(rank=rank) for rank in range(num_ranks)))


def succeeded(state: RunState) -> RunState:
    for rank in range(state.world_size):
        state = after(
            state,
            wire.Returned(rank=rank, value=wire.Packet()),
            wire.RankEnded(rank=rank, exitcode=0, wall=1042.0),
        )
    return replace(state, status="succeeded", ended=1042.0)


def with_failed(state: RunState, ranks: Iterable[int], *, error: str = "") -> RunState:
    """The run after some ranks raised; ended where ``error`` is given."""
    for rank in ranks:
        raised = wire.Raised(
            rank=rank, kind="exception", type_name="ValueError", text="bad", traceback="..."
        )
        state = after(state, raised, wire.RankEnded(rank=rank, exitcode=1, wall=1040.0))
    if not error:
        return state
    return replace(state, status="failed", ended=1042.0, failure=Failure(message=error))


def metrics(names: Iterable[str], *, steps: int = 100) -> dict[str, Curve]:
    """Curves that fall, by their names."""
    curves = {name: Curve() for name in names}
    for curve in curves.values():
        for step in range(steps):
            curve.add(step, math.exp(-step / 30))
    return curves


def html_of(bundle: dict[str, str]) -> str:
    """The HTML of a summary, with the line breaks that it does without."""
    return bundle["text/html"].replace("&#10;", "\n")
