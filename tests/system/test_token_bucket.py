from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel.system import token_bucket
from notebook_accel.system.token_bucket import TokenBucket

if TYPE_CHECKING:
    import pytest


def test_a_burst_is_let_through_and_then_the_lasting_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(token_bucket.time, "monotonic", lambda: now[0])
    bucket = TokenBucket(3, 2.0)
    assert [bucket.try_take() for _ in range(4)] == [True, True, True, False]
    now[0] += 0.5
    assert [bucket.try_take() for _ in range(2)] == [True, False]
    now[0] += 1000.0
    assert bucket.available() == 3


def test_a_debt_is_paid_back_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(token_bucket.time, "monotonic", lambda: now[0])
    bucket = TokenBucket(10, 1.0)
    bucket.take(15)
    now[0] += 5.0
    assert bucket.available() == 0
    now[0] += 1.0
    assert bucket.available() == 1
