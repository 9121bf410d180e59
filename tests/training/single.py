"""A test process that is a rank of its own, with no memory of the test before."""

from __future__ import annotations

import pytest

from notebook_accel.launch import rank

__all__ = ["Told", "fresh_rank"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Told(rank.RankContext):
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

    def count_step(self, device_memory: object = None) -> None:
        self.steps += 1


@pytest.fixture(autouse=True)
def fresh_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that knows nothing yet, in an environment that says nothing."""
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    context = rank.RankContext(rank=0, local_rank=0, world_size=1, local_world_size=1)
    monkeypatch.setattr(rank, "_process_context", context)
