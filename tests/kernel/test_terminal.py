"""IPython in a terminal: no kernel and no page, but lines, bars, sessions, a debugger, Ctrl-C."""

import os
import re
import sys
import uuid

import pexpect
import pytest

from tests.engines.processes import marked
from tests.kernel.notebooks import MARK
from tests.waiting import eventually

# Importing torch on a busy machine takes long.
SLOW = 100.0
PROMPT = r"In \[\d+\]: "
OPTIONS = ["--simple-prompt", "--no-banner", "--colors=NoColor", "--HistoryManager.enabled=False"]


class Terminal:
    """IPython in a terminal of its own."""

    def __init__(self, mark, runs):
        environment = {**os.environ, MARK: mark, "NOTEBOOK_ACCEL_RUNS": str(runs)}
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "IPython", *OPTIONS],
            env=environment,
            encoding="utf-8",
            timeout=SLOW,
            dimensions=(40, 200),
        )
        self.child.expect(PROMPT)

    def type(self, cell):
        """Type a cell of one line or more."""
        for line in cell.strip().split("\n"):
            self.child.sendline(line)
        # An empty line ends a cell of several lines; after a cell magic it takes two.
        for _ in range(2 if cell.startswith("%%") else "\n" in cell.strip()):
            self.child.sendline("")

    def run(self, cell):
        """Type a cell; gives what is on the screen until the next one can be typed."""
        self.type(cell)
        return self.rest()

    def rest(self):
        self.child.expect(PROMPT)
        return str(self.child.before).replace("\r\n", "\n")


@pytest.fixture(scope="module")
def mark():
    return uuid.uuid4().hex


@pytest.fixture(scope="module")
def terminal(mark, tmp_path_factory):
    terminal = Terminal(mark, tmp_path_factory.mktemp("runs"))
    terminal.run("%load_ext notebook_accel")
    terminal.run("from notebook_accel import notebook_launcher")
    yield terminal
    for process in marked(MARK, mark):
        process.kill()
    terminal.child.close(force=True)


TRAIN = """
def train(steps):
    import os
    from tqdm import tqdm
    for step in tqdm(range(steps), desc="train"):
        pass
    print("done on", os.environ["RANK"])
    return steps
"""


def test_a_launch_prints_lines_and_gives_results(terminal):
    terminal.run(TRAIN)
    shown = terminal.run("run = notebook_launcher(train, (3,), num_processes=2)")
    assert "[rank 0] done on 0" in shown
    assert "[rank 1] done on 1" in shown
    assert re.search(r"train: succeeded, 2 ranks, [\d.]+ s", shown)
    assert "[3, 3]" in terminal.run("run.results")


def test_a_session_shows_values_and_opens_the_debugger(terminal):
    shown = terminal.run("%%accelerate -n 2\nx = rank * 10\nx")
    assert "rank 0: 0\nrank 1: 10\n" in shown
    assert shown.count("session of 2 ranks started") == 1
    assert "\n\n\n" not in shown.partition("rank 0: 0")[2], "no empty lines of what has no place"
    terminal.type("%%accelerate\nif rank == 1:\n    x / 0")
    assert "ZeroDivisionError" in terminal.rest()
    terminal.type("%accelerate debug")
    terminal.child.expect_exact("rank 1 (pdb) ")
    terminal.child.sendline("p x")
    terminal.child.expect_exact("rank 1 (pdb) ")
    assert "10" in terminal.child.before
    terminal.child.sendline("q")
    terminal.rest()
    assert "ranks 0-1: 2" in terminal.run("%%accelerate\nworld_size")


def test_ctrl_c_ends_a_run_and_not_the_shell(terminal):
    terminal.run("def wait():\n    import time\n    print('waits')\n    time.sleep(600)")
    terminal.type("notebook_launcher(wait, num_processes=2)")
    terminal.child.expect_exact("[rank 1] waits")
    terminal.child.sendintr()
    assert "KeyboardInterrupt" in terminal.rest()
    assert "4" in terminal.run("2 + 2")


def test_doctor_and_form_are_text(terminal):
    assert "open files" in terminal.run("%accelerate doctor")
    shown = terminal.run("%accelerate config")
    assert "only a notebook" in shown
    assert "LaunchConfig" in shown


def test_its_end_leaves_nothing(terminal, mark):
    terminal.child.sendline("exit")
    terminal.child.expect(pexpect.EOF)
    eventually(lambda: not marked(MARK, mark), within=30, what="all processes ended")
