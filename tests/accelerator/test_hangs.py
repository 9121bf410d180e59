"""Ranks that wait for their device behind a collective that others never begin: who, and where."""

import linecache
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from notebook_accel import Accelerator, WorkerError, notebook_launcher
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.run import call_of
from notebook_accel.launch.view.plain import PlainView
from tests.kernel.notebooks import open_notebook
from tests.launches import launch
from tests.waiting import eventually

_SECONDS = 15.0


def _reads():
    accelerator = _begin()
    total = torch.ones(3, device=accelerator.device)
    if accelerator.is_main_process:
        dist.all_reduce(total)  # alone
    total.sum().item()
    time.sleep(600)


def _crosses():
    accelerator = _begin()
    total = torch.ones(2, device=accelerator.device)
    if accelerator.is_main_process:
        dist.broadcast(total, src=0)  # crossed
        total.sum().item()
    dist.all_reduce(torch.ones(6, device=accelerator.device))  # crossed, too
    if not accelerator.is_main_process:
        dist.broadcast(total, src=0)
    total.sum().item()


def _receives():
    accelerator = _begin()
    got = torch.ones(3, device=accelerator.device)
    dist.recv(got, src=1 - accelerator.process_index)  # nobody sends
    got.sum().item()


def _leaves(strategy):
    from notebook_accel import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if strategy == "fsdp" else None
    accelerator = _begin(fsdp_plugin=plugin)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(6):
        if step == 3 and not accelerator.is_main_process:
            break  # it has less data
        loss = model(torch.ones(2, 8, device=accelerator.device)).sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    time.sleep(600)


def _begin(**options):
    accelerator = Accelerator(**options)
    dist.all_reduce(torch.ones(1, device=accelerator.device))
    torch.accelerator.synchronize()
    print("begun", flush=True)
    return accelerator


# What each run does, and the line at which rank 0 begins what rank 1 does not.
CASES = {
    "item": (_reads, (), "# alone"),
    "another order": (_crosses, (), "# crossed"),
    "no send": (_receives, (), "# nobody"),
    "DDP": (_leaves, ("ddp",), "accelerator.backward(loss)|loss.item()"),
    "FSDP": (_leaves, ("fsdp",), "model(torch.ones|accelerator.backward(loss)"),
}


@pytest.fixture(scope="module")
def hangs():
    """The hang of each case, and the seconds from its ranks' last step until it was told."""
    config = LaunchConfig(num_processes=2, grace=1.0)
    runs = {}
    found = {}
    try:
        for name, (function, arguments, _) in CASES.items():
            runs[name] = launch(function, arguments, config=config, view=PlainView(), block=False)
        deadline = time.monotonic() + 120
        while len(found) < len(runs) and time.monotonic() < deadline:
            for name, run in runs.items():
                call_of(run).view.poll()
                hang = run.state.hang
                if hang is not None and name not in found:
                    found[name] = hang, run.state.now() - hang.since
            time.sleep(0.1)
        yield found
    finally:
        for run in runs.values():
            run.kill()
            eventually(lambda run=run: run.state.has_ended, within=30, what="it has ended")


@pytest.mark.parametrize("name", CASES)
def test_a_hang_on_a_device_names_the_line_that_began_it(name, hangs):
    hang, seconds = hangs[name]
    said = re.search(
        r"rank 0 waits in \w+(?: \(\w+\)| from rank 1)? at test_hangs.py, line (\d+)", hang.text
    )
    assert said, hang.text
    line = linecache.getline(__file__, int(said[1]))
    assert any(part in line for part in CASES[name][2].split("|")), (line, hang.text)
    if name == "no send":
        assert re.search(r"; rank 1 waits in recv from rank 0 at test_hangs.py, line", hang.text)
        return
    assert re.search(r"Collective \d+ is \w+ (of \S+.* )?on rank 0", hang.text), hang.text
    if name == "another order":
        assert re.search(
            r"broadcast of \[2\] on rank 0, .*; all_reduce of \[6\] on rank 1", hang.text
        )
    else:
        assert re.search(r"; rank 1 has come to \d+\. Every rank must", hang.text), hang.text
        assert set(hang.operations) == {0}
    assert seconds < _SECONDS


def _times_out():
    from notebook_accel import InitProcessGroupKwargs

    accelerator = _begin(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=3))])
    if accelerator.is_main_process:
        dist.all_reduce(torch.ones(3, device=accelerator.device))
        torch.ones(1, device=accelerator.device).item()
    time.sleep(600)


def test_a_timeout_of_the_watchdog_is_told_in_one_line():
    with pytest.raises(WorkerError) as raised:
        notebook_launcher(_times_out, num_processes=2, view="none", config={"grace": 1.0})
    told = str(raised.value)
    assert re.search(
        r"longer than the timeout of its process group: rank 1 waited in none; "
        r"rank 0 waited (?:[3-9]|\d\d+) s in allreduce, collective 2\n",
        told,
    ), told
    assert "frame #" not in told


def test_a_session_outlives_the_timeout_of_a_collective(tmp_path):
    with open_notebook() as book:
        book.run("%load_ext notebook_accel\nimport os, time, torch, torch.distributed as dist")
        pids = book.run("%%accelerate -n 2\nkept = 5\nos.getpid()")
        started = book.start(f"""
            %%accelerate
            from datetime import timedelta
            accelerator.wait_for_everyone()
            group = dist.new_group(timeout=timedelta(seconds=2))
            one = torch.ones(1, device=device)
            dist.all_reduce(one, group=group)
            open({str(tmp_path)!r} + f"/{{rank}}", "w").close()
            if rank == 0:
                dist.all_reduce(one, group=group)
                one.item()
            time.sleep(600)
        """)
        for rank in range(2):
            eventually((tmp_path / str(rank)).exists, within=30, what="rank 0 waits")
        time.sleep(4)
        book.interrupt()
        assert book.finish(started).status == "error"
        assert book.run("%%accelerate\nos.getpid()") == pids
        total = "int(accelerator.reduce(torch.ones(1, device=device)))"
        assert book.run(f"%%accelerate\nkept, {total}") == "ranks 0-1: (5, 2)\n"
