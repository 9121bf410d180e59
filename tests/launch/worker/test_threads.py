"""Ranks that are threads of one process (on torch_xla: tests/xla)."""

from types import SimpleNamespace

from notebook_accel.launch.worker import main, threads


def test_each_call_takes_over_the_notebooks_state_once(monkeypatch):
    taken = []
    monkeypatch.setattr(main.Worker, "_take_over", lambda _self, steps: taken.append(steps))
    first, second = (threads.HostedRank.__new__(threads.HostedRank) for _ in range(2))
    for call in (1, 2):
        for rank in (first, second):
            rank.context = SimpleNamespace(call=call)
            rank._first, rank._taken_over_for = first, getattr(rank, "_taken_over_for", 0)
            rank._take_over([call])
    assert taken == [[1], [2]]
