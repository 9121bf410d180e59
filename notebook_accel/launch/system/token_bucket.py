"""A limit on how often something may happen: bursts are allowed, a lasting flood is not."""

from __future__ import annotations

import time

__all__ = ["TokenBucket"]


class TokenBucket:
    """A bucket of tokens that fills up again with time; whoever does something takes one out.

    Args:
        capacity: how many tokens fit, and how many there are at first: the longest burst.
        per_second: how many tokens come back each second: the lasting rate.
    """

    def __init__(self, capacity: int, per_second: float) -> None:
        self._capacity = capacity
        self._per_second = per_second
        self._tokens = float(capacity)
        self._filled_at = time.monotonic()

    def available(self) -> int:
        """How many tokens there are now; 0 or less after more were taken than there were."""
        now = time.monotonic()
        gained = (now - self._filled_at) * self._per_second
        self._tokens = min(self._capacity, self._tokens + gained)
        self._filled_at = now
        return int(self._tokens)

    def take(self, number: int = 1) -> None:
        """Take tokens out, also more than there are: the debt is paid back with time."""
        self._tokens -= number

    def try_take(self) -> bool:
        """Take one token out where there is one, and say whether there was."""
        if self.available() < 1:
            return False
        self.take()
        return True
