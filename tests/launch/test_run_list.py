"""The list of this kernel's runs, which several threads change."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from notebook_accel.launch import run_list

if TYPE_CHECKING:
    import pytest


class Listed:
    """A run, as far as the list looks at it."""

    state = SimpleNamespace(has_ended=True)

    def _without_results(self) -> Listed:
        return self


def test_runs_that_begin_at_once_in_two_threads_are_both_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_list, "_known", [])
    second: Any = Listed()
    other = threading.Thread(target=run_list.add, args=(second,))

    class First(Listed):
        def _without_results(self) -> Listed:
            """In the middle of `add`: the other thread comes now, if it can."""
            other.start()
            other.join(0.2)
            return self

    first: Any = First()
    run_list.add(first)
    other.join()
    assert {*run_list.runs()} == {first, second}
