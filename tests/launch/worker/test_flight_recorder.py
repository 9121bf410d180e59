"""A rank's newest collectives, from entries as torch's flight recorder has them."""

from typing import Any

import pytest

from notebook_accel.launch.worker import flight_recorder
from notebook_accel.private import of_torch


class Recorder:
    """Records as ProcessGroupNCCL does: a batch of sends has the number of the collective before.

    Its parts are never said to be done. What ends it is no send or receive by torch's count.
    """

    def __init__(self):
        self.entries: list[dict[str, Any]] = []
        self.number = 0

    def collective(self, name, *, retired=True):
        self.number += 1
        self._add(f"nccl:{name}", retired=retired)

    def point(self, name, *, retired=False):
        self._add(f"nccl:{name}", is_p2p=True, retired=retired)

    def end_batch(self, *, retired):
        self._add("nccl:coalesced", sizes=[], retired=retired)

    def _add(self, name, **more):
        self.entries.append(
            {
                "collective_seq_id": self.number,
                "frames": [{"filename": "cell.py", "line": 7, "name": "train"}],
                "input_sizes": more.pop("sizes", [[3]]),
                "is_p2p": False,
                "process_group": ("5", "of a stage"),
                "profiling_name": name,
                "time_created_ns": 10**9,
                **more,
            }
        )


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(flight_recorder, "has_process_group", lambda: True)
    monkeypatch.setattr(of_torch, "ranks_of_groups", lambda: {"5": [4, 6, 7]})
    monkeypatch.setattr(of_torch, "recorded_collectives", lambda: made.entries)
    return made


def told():
    return [*flight_recorder.newest(since=0, notice=pytest.fail)]


def test_a_send_or_receive_names_the_other_rank(recorder):
    recorder.point("recv 0<-1")
    recorder.point("send 1->2")
    told_now = [(one.operation, one.peer, one.is_pending, one.group) for one in told()]
    assert told_now == [
        ("recv from rank 6", 6, True, "5 nccl"),
        ("send to rank 7", 7, True, "5 nccl"),
    ]


def test_a_batch_of_sends_takes_the_place_of_no_collective(recorder):
    recorder.collective("all_reduce")
    for kind in ("send 0->1", "recv 0<-1"):
        recorder.point(kind)
    recorder.end_batch(retired=True)
    recorder.point("send 0->2", retired=True)
    assert [(one.operation, one.number) for one in told()] == [("all_reduce", 1)]
    recorder.point("recv 0<-2")
    recorder.end_batch(retired=False)
    waiting = [(one.operation, one.is_pending) for one in told()]
    assert waiting == [("all_reduce", False), ("recv from rank 7", True)]


def test_collectives_have_the_names_by_which_they_are_called(recorder):
    recorder.collective("_all_gather_base")
    recorder.collective("all_reduce_barrier", retired=False)
    assert [one.operation for one in told()] == ["all_gather_into_tensor", "barrier"]
    assert [one.ranks for one in told()] == [(4, 6, 7)] * 2
