"""However a kernel ends or is interrupted, whatever its ranks do: nobody of ours is left."""

import os
import random
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.engines.processes import files_left, gone
from tests.kernel.notebooks import open_notebook
from tests.templates import IMPORT_LITTLE
from tests.waiting import eventually

# From the end of the kernel until nothing of ours is left: wide enough for a busy machine.
GONE = 20.0
# From an interrupt until the cell has ended, likewise.
ENDED = 30.0
READY = 60.0
KINDS = ("loop", "native", "native_with_the_gil", "stubborn")

_FUNCTIONS = """
import ctypes, os, signal, subprocess, time
from pathlib import Path
from notebook_accel import notebook_launcher, runs

def arrive(name):
    (folder / (name + os.environ["RANK"])).touch()

def lock_twice(libc):
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)

def loop():
    # In the ranks alone, which have it from their template: a kernel takes two seconds for it.
    from torch.utils.data import DataLoader
    batches = iter(DataLoader(range(10**9), num_workers=2))
    next(batches)
    subprocess.Popen(["setsid", "sleep", "600"])
    arrive("loop")
    while True:
        time.sleep(0.001)

def native():
    arrive("native")
    lock_twice(ctypes.CDLL(None))

def native_with_the_gil():
    arrive("native_with_the_gil")
    lock_twice(ctypes.PyDLL(None))

def brief():
    time.sleep(0.2)

def stubborn():
    arrive("stubborn")
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass
"""
# A fork of the kernel holds copies of all its sockets. Python 3.12 warns of one beside threads.
_FORK = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if not child:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(600)
    os._exit(0)
print(child)
"""


@pytest.fixture
def prepared(notebook, tmp_path):
    """A notebook with the functions, whose kernel has forked a child."""
    notebook.manager.shutdown_wait_time = 1.0
    notebook.run(f"{IMPORT_LITTLE}{_FUNCTIONS}folder = Path({str(tmp_path)!r})")
    return notebook


@pytest.fixture(scope="module")
def long_lived():
    """The notebook of the tests that its kernel outlives, and its template is ready."""
    with open_notebook() as notebook:
        notebook.run(IMPORT_LITTLE + _FUNCTIONS)
        notebook.run("notebook_launcher(lambda: 1, (), 2)")
        yield notebook


@pytest.fixture
def lasting(long_lived, tmp_path):
    """That notebook, whose ranks say in a new folder where they are."""
    long_lived.run(f"folder = Path({str(tmp_path)!r})")
    return long_lived


def _arrived(folder, name):
    return lambda: len(list(folder.glob(f"{name}[01]"))) == 2


@pytest.mark.parametrize(
    ("end", "is_busy"),
    [
        pytest.param(lambda notebook: os.kill(notebook.pid, signal.SIGKILL), False, id="killed"),
        pytest.param(lambda notebook: notebook.manager.restart_kernel(), True, id="restarted"),
        pytest.param(lambda n: n.manager.restart_kernel(now=True), True, id="restarted at once"),
        pytest.param(lambda notebook: notebook.manager.shutdown_kernel(), False, id="shut down"),
    ],
)
def test_nothing_outlives_the_kernel(prepared, tmp_path, end, is_busy):
    kernel = prepared.pid
    for kind in KINDS[:-1]:
        prepared.run(f"notebook_launcher({kind}, (), 2, block=False)")
    # Not before there is something of ours whose descriptors the child inherits.
    child = int(prepared.run(_FORK))
    prepared.start(f"notebook_launcher({KINDS[-1]}, (), 2, block={is_busy})")
    for kind in KINDS:
        eventually(_arrived(tmp_path, kind), within=READY, what=f"{kind}: both ranks are in it")
    # A template, four agents, eight ranks, four loader workers, two in sessions of their own, which
    # have no environment to be known by while they become another program.
    eventually(lambda: len(prepared.others(child)) >= 19, within=READY, what="all are there")
    end(prepared)
    eventually(lambda: gone([kernel]), within=READY, what="the kernel ended")
    prepared.expect(0, but=child, within=GONE)
    # Nor a file, that of a loader's workers included. A new kernel tries the folder with one.
    left = partial(files_left, os.environ["TMPDIR"])
    eventually(lambda: left() == [], within=GONE, what="no file is left")


def test_nothing_outlives_a_kernel_that_dies_while_the_template_starts(prepared):
    prepared.run("from notebook_accel.launch.template.handle import template; source = template()")
    child = int(prepared.run(_FORK))
    (template,) = prepared.others(child)
    # It looks for its kernel before that.
    eventually(lambda: _imports_torch(template.pid), within=READY, what="the template imports")
    os.kill(prepared.pid, signal.SIGKILL)
    prepared.expect(0, but=child, within=GONE)


def test_ranks_die_with_their_agent_where_nobody_else_can_act(prepared, tmp_path):
    template, agent = _launched(prepared, tmp_path, "native_with_the_gil")
    template.suspend()
    os.kill(prepared.pid, signal.SIGSTOP)
    agent.kill()
    try:
        prepared.expect(0, but=template.pid, within=GONE)
    finally:
        template.resume()


def test_an_agent_sees_its_kernel_die_where_the_template_is_dead(prepared, tmp_path):
    template, _ = _launched(prepared, tmp_path, "loop")
    child = int(prepared.run(_FORK))
    template.kill()
    eventually(lambda: gone([template.pid]), within=READY, what="the template is dead")
    os.kill(prepared.pid, signal.SIGKILL)
    prepared.expect(0, but=child, within=GONE)


def test_a_kernel_ends_what_a_dead_agent_and_a_dead_template_left(lasting, tmp_path):
    template, agent = _launched(lasting, tmp_path, "loop")
    template.kill()
    eventually(lambda: gone([template.pid]), within=READY, what="the template is dead")
    agent.kill()
    lasting.expect(0, but=template.pid, within=GONE)
    assert "SIGKILL" in lasting.fails("run.wait()") or "is gone" in lasting.fails("run.wait()")
    assert lasting.run("print(notebook_launcher(lambda: 1, (), 2).results)") == "[1, 1]\n"


def _launched(notebook, folder, kind):
    """A run that goes on; gives the template and its agent."""
    notebook.run(f"run = notebook_launcher({kind}, (), 2, block=False)")
    eventually(_arrived(folder, kind), within=READY, what=f"{kind}: both ranks are in it")
    (template,) = psutil.Process(notebook.pid).children()
    # That of an earlier run may still be on its way out.
    eventually(lambda: len(template.children()) == 1, within=READY, what="it has one agent")
    (agent,) = template.children()
    return template, agent


def test_interrupts_at_any_moment_of_a_launch(lasting):
    moments = random.Random(0)
    lasting.run("others = set(run.id for run in runs())")
    for _ in range(10):
        cell = lasting.start("notebook_launcher(brief, (), 2, view='none')")
        time.sleep(0.12 * moments.random())
        for _ in range(3):
            lasting.interrupt()
            time.sleep(0.02 * moments.random())
        lasting.finish(cell, timeout=READY)
    lasting.expect(1, but=lasting.pid, within=GONE)
    lasting.run("""
        new = [run for run in runs() if run.id not in others]
        for run in new:
            run.results  # waits for the end: the last interrupt has cut the launch's own wait
        statuses = {run.status for run in new}
        assert statuses <= {'stopped', 'succeeded'}, statuses
    """)
    assert lasting.run("print(notebook_launcher(lambda: 1, (), 2).results)") == "[1, 1]\n"


# The last one of that notebook, whose kernel has a child from here on.
def test_interrupts(lasting, tmp_path):
    child = int(lasting.run(_FORK))

    def is_alone():
        return len(lasting.others(child)) == 1

    # Only the template is left.
    lasting.expect(1, but=child, within=GONE)
    for kind in KINDS:
        cell = lasting.start(f"notebook_launcher({kind}, (), 2)")
        eventually(_arrived(tmp_path, kind), within=READY, what=f"{kind}: both ranks are in it")
        _press(lasting, at_most=1 if kind == "loop" else 3, until=is_alone)
        reply = lasting.finish(cell, timeout=ENDED)
        assert "KeyboardInterrupt" in "\n".join(reply.traceback)
        lasting.expect(1, but=child, within=GONE)
        assert lasting.run("print(runs()[-1].status)") == "stopped\n"
    assert lasting.run("print(notebook_launcher(lambda: 1, (), 2).results)") == "[1, 1]\n"


def _imports_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def _press(notebook, *, at_most, until):
    for _ in range(at_most):
        notebook.interrupt()
        with suppress(AssertionError):
            eventually(until, within=0.5, what="it ended")
            return
