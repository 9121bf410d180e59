"""The simulated accelerator is what other tests rely on: asynchronous, with memory of its own."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.ports import free_port

COMMON = """
import os, time, torch, torch.distributed as dist
from torch import nn
rank = int(os.environ["RANK"])
"""


def printed(code, *, world=2, env=None):
    """What each rank prints that runs the code, and ends well."""
    sizes = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", COMMON + textwrap.dedent(code)],
            env={**os.environ, **sizes, "RANK": str(rank), "OMP_NUM_THREADS": "1", **(env or {})},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    outs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, outs
    return outs


def test_memory_is_counted_and_limited():
    before = torch.accelerator.memory_allocated()
    block = torch.empty(1 << 20, device="sim")
    assert torch.accelerator.memory_allocated() - before == 4 << 20
    with pytest.raises(
        torch.OutOfMemoryError, match=r"SIM out of memory\. Tried to allocate 4\.00 GiB"
    ):
        torch.empty(1 << 30, device="sim")
    del block
    torch.sim.synchronize()
    assert torch.sim.memory_allocated() == before


def test_kernel_errors_come_later_and_stay():
    code = """
    x = nn.Embedding(4, 2).to("sim")(torch.tensor([9], device="sim"))
    print("went on")
    for _ in range(2):
        try:
            x.sum().item()
        except RuntimeError as error:
            print(str(error).splitlines()[0])
    """
    out = printed(code, world=1)[0]
    assert out.splitlines() == ["went on"] + ["SIM error: device-side assert triggered"] * 2


def test_use_in_a_forked_child_raises():
    code = """
    torch.ones(1, device="sim")
    if not os.fork():
        try:
            torch.ones(1, device="sim")
        except RuntimeError as error:
            print(error)
        os._exit(0)
    os.wait()
    """
    assert "Cannot re-initialize SIM in forked subprocess" in printed(code, world=1)[0]


def test_asking_for_devices_makes_no_context(tmp_path):
    log = tmp_path / "log"
    code = """
    torch.accelerator.is_available(), torch.accelerator.device_count(), torch.manual_seed(1)
    torch.accelerator.current_accelerator()
    assert not torch.sim.is_initialized()
    """
    printed(code, world=1, env={"SIM_CONTEXT_LOG": str(log)})
    assert not log.exists()


def test_host_runs_ahead_of_collectives_until_it_reads():
    code = """
    torch.sim.set_device(rank)
    dist.init_process_group("cpu:gloo,sim:simccl")
    one = torch.ones(1, device="sim"); dist.all_reduce(one); one += 1; one.item()
    dist.barrier()
    if rank: time.sleep(2)
    began = time.monotonic()
    dist.all_reduce(one); one += 1
    launched = time.monotonic() - began
    assert one.item() == 7
    print(launched, time.monotonic() - began)
    dist.destroy_process_group()
    """
    launched, read = map(float, printed(code)[0].split())
    assert launched < 0.5
    assert read > 1.5
