"""A person stops a training in a notebook, goes on with another rate, and clones it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.kernel.notebooks import open_notebook

TRAIN = """
import time
import torch
from notebook_accel import Accelerator, find_run, last_run, notebook_launcher, runs

def train(lr, width=4, size=4000):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = torch.utils.data.DataLoader(torch.ones(size, 1), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = 0
    for x in loader:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen += 1
        accelerator.log({"seen": seen})
        time.sleep(0.01 if lr == 0.1 else 0)
    return seen, optimizer.param_groups[0]["lr"]
"""
BEGIN = """
run = notebook_launcher(train, (0.1,), 2, block=False)
while run.state.ranks[0].steps < 10:
    time.sleep(0.01)
"""
GO_ON = "notebook_launcher(train, kwargs={'lr': 0.01}, num_processes=2, resume=%s)"


@pytest.mark.timeout(300)
def test_a_run_is_paused_stopped_and_goes_on_in_this_kernel_and_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path / "runs"))
    with open_notebook() as notebook, open_notebook() as other:
        notebook.run(TRAIN + BEGIN)
        other.run(TRAIN)
        notebook.run("run.pause()")
        assert "paused" in other.run("print(runs(everywhere=True))")
        notebook.run("run.go_on()")
        assert "running" in other.run("print(runs(everywhere=True))")
        notebook.run("run.stop(); run.results; done = run.state.ranks[0].steps")
        notebook.run(f"again = {GO_ON % 'last_run()'}")
        run_id, done, *results = ast.literal_eval(
            notebook.run("print([run.id, done, *again.results])")
        )
        assert results == [(1000 - done, 0.01)] * 2
        assert f"begins at batch {done}" in notebook.run("print(again.state.notices)")
        # That run is the newest now, and has ended well.
        assert "It wrote no checkpoint" in notebook.fails(GO_ON % "last_run()")
        wider = (GO_ON % "run").replace("0.01", "0.01, 'width': 8")
        wrong = notebook.fails(wider)
        assert "size mismatch for 0.weight: (4, 1) there, (8, 1) in the model" in wrong
        found = other.run(f"print({GO_ON % f'find_run({run_id!r})'}.results)")
        assert ast.literal_eval(found.splitlines()[-1]) == results
        notebook.run("clone = run.clone(lr=0.02, size=40)")
        assert notebook.run("print(clone.wait().results, clone.name)").endswith(
            "[(10, 0.02), (10, 0.02)] lr=0.02, size=40\n"
        )
