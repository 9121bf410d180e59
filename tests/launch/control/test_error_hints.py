"""Which failures are known, and that no other one is taken for them."""

from __future__ import annotations

import os

from notebook_accel import wire
from notebook_accel.launch.control.run_state import RankState
from notebook_accel.launch.control.verdict import hint_lines


def raised(text: str) -> RankState:
    told = wire.Raised(kind="exception", type_name="RuntimeError", text=text, traceback="")
    return RankState(rank=0, failure=told)


def test_tensors_that_do_not_go_together() -> None:
    words = "data size doesn't match expected size"
    for rank in (raised(words), RankState(rank=0, signal=6, tail=("what():", words))):
        empty, hint = hint_lines(rank)
        assert not empty
        assert "debug=True" in hint


def test_memory_of_a_device_that_the_notebook_itself_holds() -> None:
    words = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB "
        "of which 1.00 GiB is free. Process {} has 14.00 GiB memory in use. Of the allocated ..."
    )
    assert "this notebook's own kernel" in hint_lines(raised(words.format(os.getpid())))[1]
    assert hint_lines(raised(words.format(os.getppid()))) == []


def test_what_is_not_known_has_no_hint() -> None:
    assert hint_lines(raised("bad batch")) == hint_lines(RankState(rank=0, signal=9)) == []
