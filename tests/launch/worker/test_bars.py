"""Bars of tqdm report to their rank, whatever way they are made."""

import gc
import io
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from tqdm import tqdm, trange
from tqdm.auto import tqdm as auto

from notebook_accel.rank.this_rank import current
from tests.launches import on_cpu


def loops():
    list(tqdm(range(3), desc="plain"))
    list(trange(4, desc="a range"))
    list(auto(range(5), desc="auto", leave=False))
    list(tqdm([], desc="empty"))
    list(tqdm((n for n in range(6)), desc="no total"))
    for _ in tqdm(range(10), desc="left"):
        break
    bar = tqdm(total=5, desc="no end")
    bar.total = float("inf")
    bar.update(float("nan"))
    bar.close()
    for _ in tqdm(range(2), desc="outer"):
        list(tqdm(range(3), desc="inner", leave=False))


def of_notebooks():
    from tqdm.notebook import tnrange, tqdm, tqdm_notebook, trange

    for number, bar in enumerate((tqdm, tqdm_notebook), start=2):
        list(bar(range(number), desc=f"widget {number}"))
    for number, bar in enumerate((trange, tnrange), start=4):
        list(bar(number, desc=f"widget {number}"))


class Mine(tqdm):
    """A bar of a person who changes what bars do."""

    done = ()

    def update(self, n=1):
        self.done += (n,)
        return super().update(n)

    def display(self, *args, **kwargs):
        self.done += ("displayed",)
        return super().display(*args, **kwargs)


def of_a_subclass():
    with Mine(total=10, desc="mine") as bar:
        for _ in range(10):
            bar.update()
    return bar.done.count(1), "displayed" in bar.done


def by_hand():
    bar = tqdm(total=100, desc="manual", unit="B", unit_scale=True)
    bar.update(30)
    bar.set_description("renamed")
    bar.set_postfix(loss=0.5)
    bar.total = 200
    bar.refresh()
    bar.reset(50)
    bar.update(7)
    bar.close()
    bar.close()
    with tqdm(range(3), disable=True) as bar:
        bar.set_description("disabled")
        bar.refresh()
        bar.clear()
    bar = tqdm(total=5, desc="dropped")
    bar.update(1)
    del bar
    gc.collect()


def to_files():
    for number in tqdm(range(3), desc="loop"):
        tqdm.write(f"line {number}", file=sys.stderr)
    own = io.StringIO()
    list(tqdm(range(3), desc="own", file=own))
    list(tqdm(range(3), desc="out", file=sys.stdout))
    return own.getvalue()


def in_a_forked_child(told):
    outer = tqdm(total=5, desc="parent")
    before = told.call_count
    pid = os.fork()
    if not pid:
        list(tqdm(range(3), desc="child"))
        outer.update(5)
        outer.close()
        os._exit(told.call_count - before)
    outer.update(2)
    outer.close()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fast(told):
    before = told.call_count
    bar = tqdm(total=20_000, desc="fast")
    for step in range(20_000):
        bar.update(1)
        bar.set_postfix(loss=step)
    bar.close()
    return told.call_count - before


def in_threads():
    def work(number):
        list(tqdm(range(number), desc=f"thread {number}"))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (3, 4)))


def play():
    current().send = told = Mock(wraps=current().send)
    loops()
    of_notebooks()
    by_hand()
    own_file, own_class = to_files(), of_a_subclass()
    numbers = in_a_forked_child(told), fast(told)
    in_threads()
    return own_file, own_class, *numbers


@pytest.fixture(scope="module")
def run():
    return on_cpu(play, n=1)


def test_bars_report_however_they_are_made(run):
    bars = run.state.ranks[0].bars
    assert all(bar.closed for bar in bars)
    told = [(bar.name, bar.n, bar.total) for bar in bars]
    assert told[:-2] == [
        *(("plain", 3, 3), ("a range", 4, 4), ("auto", 5, 5), ("empty", 0, 0)),
        *(("no total", 6, None), ("left", 0, 10), ("no end", 0, None)),
        *(("outer", 2, 2), ("inner", 3, 3), ("inner", 3, 3)),
        *((f"widget {number}", number, number) for number in (2, 3, 4, 5)),
        *(("renamed", 7, 50), ("dropped", 1, 5), ("loop", 3, 3), ("out", 3, 3)),
        *(("mine", 10, 10), ("parent", 2, 5), ("fast", 20_000, 20_000)),
    ]
    assert {*told[-2:]} == {("thread 3", 3, 3), ("thread 4", 4, 4)}
    assert [bar.postfix for bar in bars if bar.name == "renamed"] == ["loss=0.5"]


def test_nothing_is_drawn(run):
    own_file, own_class, *_ = run[0]
    assert run.logs(0) == "line 0\nline 1\nline 2\n"
    assert "own: 100%" in own_file, "but into a file of its own"
    assert own_class == (10, True), "what a class does beside is done"


def test_neither_a_forked_child_nor_a_bar_that_is_refreshed_at_every_step_floods(run):
    *_, by_child, by_fast = run[0]
    assert by_child == 0
    assert by_fast < 2000
