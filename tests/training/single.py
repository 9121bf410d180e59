"""A test process that is a rank of its own, with no memory of the test before."""

from contextvars import ContextVar
from typing import Any

import pytest

import notebook_accel
from notebook_accel.rank import this_rank

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Told(this_rank.RankContext):
    """A launched rank whose reports are lists."""

    launched = True

    def __init__(self) -> None:
        super().__init__(rank=0, local_rank=0, world_size=1, local_world_size=1)
        self.notices: list[str] = []
        self.metrics: list[tuple[dict[str, float], int | None]] = []
        self.steps = 0

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def metric(self, values: object, step: int | None = None) -> None:
        self.metrics.append((dict(values), step))  # type: ignore[call-overload]

    def count_step(self, device_memory: object = None, *, skipped: bool = False) -> None:
        self.steps += not skipped


def forget_states(library: Any = notebook_accel) -> None:
    """Let what comes next begin as a script of its own, under ours or Accelerate."""
    library.state.AcceleratorState._reset_state(True)
    library.state.GradientState._reset_state()


def be(context: this_rank.RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_rank, "_process_context", context)
    monkeypatch.setattr(this_rank, "_context", ContextVar("fresh", default=None))


@pytest.fixture(autouse=True)
def fresh_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    be(this_rank.RankContext(rank=0, local_rank=0, world_size=1, local_world_size=1), monkeypatch)
