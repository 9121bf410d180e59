"""The one way in which tests wait: for a condition, until a deadline."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], *, within: float = 100.0, what: str) -> None:
    """Wait until ``condition()`` holds; 100 s are wide enough for a busy machine."""
    deadline = time.monotonic() + within
    while True:
        began = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < deadline, f"not within {within} s: {what}"
        # A look at all processes takes time that those need who are waited for.
        time.sleep(min(max(0.005, 2 * (now - began)), 0.1))
