"""A limit on how often something may happen: bursts are allowed, a lasting flood is not."""

from __future__ import annotations

import time


class TokenBucket:
    """Limits a rate: each action takes tokens out of a bucket, which fills up again with time."""

    def __init__(self, capacity: int, per_second: float) -> None:
        self._capacity = capacity
        self._per_second = per_second
        self._tokens = float(capacity)
        self._filled_at = time.monotonic()

    def available(self) -> int:
        now = time.monotonic()
        gained = (now - self._filled_at) * self._per_second
        self._tokens = min(self._capacity, self._tokens + gained)
        self._filled_at = now
        return int(self._tokens)

    def take(self, number: int = 1) -> None:
        """Take tokens, even more than there are: the number of tokens is then negative."""
        self._tokens -= number

    def try_take(self) -> bool:
        """Take one token if there is one; return whether a token was taken."""
        if self.available() < 1:
            return False
        self.take()
        return True
