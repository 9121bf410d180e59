"""The list of this kernel's runs, which several threads change."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from notebook_accel.launch import run_list
from notebook_accel.launch.control.run_folder import RunFolder
from notebook_accel.launch.control.state import starting

if TYPE_CHECKING:
    from pathlib import Path

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


def test_a_run_whose_kernel_ends_while_it_is_read_has_its_own_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path))
    folder = RunFolder.make()
    state = starting(run=folder.id, name="train", world_size=1, started=0.0)
    folder.save(replace(state, status="running"))

    def end(_: RunFolder) -> bool:
        """The kernel saves the end of its run and ends, just before it is asked for."""
        folder.save(replace(state, status="succeeded", ended=1.0))
        return False

    monkeypatch.setattr(RunFolder, "is_held", property(end))
    assert run_list.find_run(folder.id).status == "succeeded"
