"""Bars of tqdm report to their rank, whatever way they are made."""

import json
import subprocess
import sys

import pytest

# Bars are patched for the life of a process: each scene runs in one of its own, as in a rank.
_STAGE = """
import io, json, os, sys, threading, time
from notebook_accel import wire
from notebook_accel.rank import this_rank
from notebook_accel.launch.worker import bars
from notebook_accel.actions.scoreboard import Scoreboard

told = []
context = this_rank.LaunchedContext(
    rank=3, local_rank=0, world_size=4, local_world_size=1, run="r",
    send=told.append, board=Scoreboard(1),
)
this_rank.enter(context)
bars.install()
facts = {}
"""
_CURTAIN = """
last = {}
for message in told:
    assert isinstance(message, wire.Bar) and message.rank == 3
    last[message.bar] = [message.name, message.n, message.total, message.closed]
    facts.setdefault("postfix", []).append(message.postfix)
json.dump({"bars": list(last.values()), "told": len(told), **facts}, sys.__stdout__)
"""


def play(scene):
    """What the bars of a scene told, in the order in which they were opened."""
    done = subprocess.run(
        # Python 3.12 warns of a fork beside threads.
        [sys.executable, "-W", "ignore:This process", "-c", _STAGE + scene + _CURTAIN],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {**found, "stderr": done.stderr}


SCENES = {
    "loops": """
from tqdm import tqdm, trange
from tqdm.auto import tqdm as auto
for _ in tqdm(range(3), desc="plain"): pass
for _ in trange(4, desc="a range"): pass
for _ in auto(range(5), desc="auto", leave=False): pass
for _ in tqdm([], desc="empty"): pass
for _ in tqdm((n for n in range(6)), desc="no total"): pass
for _ in tqdm(range(10), desc="left"):
    break
bar = tqdm(total=5, desc="no end")
bar.total = float("inf")
bar.update(float("nan"))
bar.close()
""",
    "notebook": """
from tqdm.notebook import tqdm, trange, tqdm_notebook, tnrange
for _ in tqdm(range(2), desc="a"): pass
for _ in trange(3, desc="b"): pass
for _ in tqdm_notebook(range(4), desc="c"): pass
""",
    "subclass": """
from tqdm import tqdm
class Mine(tqdm):
    def update(self, n=1):
        facts["updated"] = facts.get("updated", 0) + n
        return super().update(n)
    def display(self, *args, **kwargs):
        facts["displayed"] = True
        return super().display(*args, **kwargs)
with Mine(total=10, desc="mine") as bar:
    for _ in range(10):
        bar.update()
""",
    "nested": """
from tqdm import tqdm
for _ in tqdm(range(2), desc="outer"):
    for _ in tqdm(range(3), desc="inner", leave=False): pass
""",
    "manual": """
from tqdm import tqdm
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
""",
    "write": """
from tqdm import tqdm
for number in tqdm(range(3), desc="loop"):
    tqdm.write(f"line {number}", file=sys.stderr)
""",
    "own file": """
from tqdm import tqdm
own = io.StringIO()
for _ in tqdm(range(3), desc="own", file=own): pass
facts["own"] = own.getvalue()
for _ in tqdm(range(3), desc="out", file=sys.stdout): pass
""",
    "disabled": """
from tqdm import tqdm
with tqdm(range(3), disable=True) as bar:
    for _ in bar: pass
    bar.set_description("x"); bar.refresh(); bar.clear()
""",
    "thread": """
from tqdm import tqdm
def work(number):
    for _ in tqdm(range(number), desc=f"thread {number}"): pass
threads = [threading.Thread(target=work, args=(n,)) for n in (3, 4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""",
    "child": """
from tqdm import tqdm
outer = tqdm(total=5, desc="parent")
before = len(told)
pid = os.fork()
if not pid:
    for _ in tqdm(range(3), desc="child"): pass
    outer.update(5)
    outer.close()
    os._exit(len(told) - before)
facts["told by the child"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
outer.update(2)
outer.close()
""",
    "fast": """
from tqdm import tqdm
bar = tqdm(total=20000, desc="fast")
for step in range(20000):
    bar.update(1)
    bar.set_postfix(loss=step)
bar.close()
""",
    "dropped": """
import gc
from tqdm import tqdm
bar = tqdm(total=5, desc="dropped")
bar.update(1)
del bar
gc.collect()
""",
}


@pytest.fixture(scope="module")
def played():
    """All scenes at once: most of the time of each is its imports."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        return dict(zip(SCENES, pool.map(play, SCENES.values()), strict=True))


@pytest.mark.parametrize(
    ("scene", "bars"),
    [
        (
            "loops",
            [
                ["plain", 3, 3, True],
                ["a range", 4, 4, True],
                ["auto", 5, 5, True],
                ["empty", 0, 0, True],
                ["no total", 6, None, True],
                ["left", 0, 10, True],
                ["no end", 0, None, True],
            ],
        ),
        ("notebook", [["a", 2, 2, True], ["b", 3, 3, True], ["c", 4, 4, True]]),
        ("subclass", [["mine", 10, 10, True]]),
        ("nested", [["outer", 2, 2, True], ["inner", 3, 3, True], ["inner", 3, 3, True]]),
        ("manual", [["renamed", 7, 50, True]]),
        ("write", [["loop", 3, 3, True]]),
        ("own file", [["out", 3, 3, True]]),
        ("disabled", []),
        ("child", [["parent", 2, 5, True]]),
        ("fast", [["fast", 20000, 20000, True]]),
        ("dropped", [["dropped", 1, 5, True]]),
    ],
)
def test_bars_report_however_they_are_made(scene, bars, played):
    assert played[scene]["bars"] == bars


def test_nothing_is_drawn(played):
    drawn = {name: scene["stderr"] for name, scene in played.items() if scene["stderr"]}
    assert drawn == {"write": "line 0\nline 1\nline 2\n"}
    assert "own: 100%" in played["own file"]["own"], "but into a file of its own"


def test_bars_in_threads(played):
    told = sorted(played["thread"]["bars"])
    assert told == [["thread 3", 3, 3, True], ["thread 4", 4, 4, True]]


def test_bars_do_beside_what_they_did(played):
    assert (played["subclass"]["updated"], played["subclass"]["displayed"]) == (10, True)
    postfix = played["manual"]["postfix"]
    assert (postfix[0], postfix[-1]) == ("", "loss=0.5")


def test_neither_a_forked_child_nor_a_bar_that_is_refreshed_at_every_step_floods(played):
    assert played["child"]["told by the child"] == 0
    assert played["fast"]["told"] < 2000
