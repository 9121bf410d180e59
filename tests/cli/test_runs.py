"""``runs``, ``logs`` and ``stop`` beside the kernel whose run it is."""

import os
import subprocess
import sys
import threading

import pytest

from notebook_accel import find_run, notebook_launcher
from notebook_accel.cli import main
from notebook_accel.launch import run_list
from tests.notebook.kernels import ROOT, open_kernel

# The kernel, its ranks and the command beside them import torch.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _no_runs(tmp_path, monkeypatch):
    """As in the process of a command: no run is its own, and here none is on disk."""
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path))
    monkeypatch.setattr(run_list, "_known", [])


CELL = """
def train(folder):
    import torch
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    print("begins on", accelerator.process_index)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(10**9), batch_size=1))
    for number, batch in enumerate(loader):
        print("batch", number)
        accelerator.print()
        __import__("time").sleep(0.05)
from notebook_accel import notebook_launcher
run = notebook_launcher(train, ("x",), num_processes=2, block=False)
print(run.id)
"""


def said(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_a_run_of_a_live_kernel(capsys):
    with open_kernel() as kernel:
        reply = kernel.run(CELL, timeout=200)
        run_id = find_id(reply.text)
        command = [sys.executable, "-m", "notebook_accel", "logs", "-f", run_id[-6:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as follower:
            killer = threading.Timer(250, follower.kill)
            killer.start()
            lines = iter(follower.stdout.readline, "")
            seen = [next(lines)]
            while not {"[rank 0] batch 1\n", "[rank 1] batch 1\n"} <= {*seen}:
                seen.append(next(lines))
            assert {"[rank 0] begins on 0\n", "[rank 1] begins on 1\n"} <= {*seen}
            head, row = said(capsys, "runs").splitlines()
            assert head.split()[:4] == ["ID", "STATUS", "STARTED", "TOOK"]
            assert row.split()[:2] == [run_id, "running"]
            assert "2 ranks  train" in row
            assert said(capsys, "stop") == f"run {run_id} of train stops\n"
            # It ends with the run, and has all that was printed.
            seen.extend(lines)
            killer.cancel()
            assert follower.wait() == 0
        assert find_run(run_id).status == "stopped"
        of_rank_1 = [line for line in seen if line.startswith("[rank 1]")]
        assert "".join(of_rank_1).replace("[rank 1] ", "") == said(
            capsys, "logs", run_id, "--rank", "1"
        )
        assert "stopped" in said(capsys, "runs")
        again = kernel.run("run = notebook_launcher(train, ('x',), block=False)", timeout=200)
        assert again.status == "ok"
        assert "ends" in said(capsys, "stop", "--kill")
        kernel.run("run.wait(60)", timeout=100)
        assert main(["stop"]) == 2
        assert "there is no run that goes on" in capsys.readouterr().err


def find_id(text):
    return next(word for word in text.split() if word[:2] == "20" and word.count("-") == 2)


def test_what_no_run_is_called_is_refused(capsys):
    assert main(["logs"]) == 2
    assert "there is no run" in capsys.readouterr().err
    run = notebook_launcher(lambda: print("here"), engine="inline", view="none")
    assert main(["logs", "no such"]) == 2
    assert "there is no run 'no such'" in capsys.readouterr().err
    assert main(["logs", run.id, "--rank", "3"]) == 2
    assert "has the ranks 0 to 0" in capsys.readouterr().err
    for command in (["logs"], ["logs", "-f"]):
        assert main(command) == 0
        assert capsys.readouterr().out == f"run {run.id} of <lambda> has printed nothing\n"
