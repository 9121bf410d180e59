"""The simulated accelerator itself behaves as its README says: by plain torch."""

# ruff: noqa: F821 (names that COMMON defines, here as in the ranks)

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch import nn

COMMON = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from torch import nn
def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))
def batches(n=6, size=32):
    g = torch.Generator().manual_seed(3)
    xs = [torch.randn(size, 8, generator=g) for _ in range(n)]
    return [(x, torch.randint(0, 3, (size,), generator=g)) for x in xs]
def train(model, data, optimizer=torch.optim.AdamW):
    opt = optimizer(model.parameters(), lr=0.05)
    losses = []
    for x, y in data:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return [one.item() for one in losses]
rank = int(os.environ.get("RANK", 0)); world = int(os.environ.get("WORLD_SIZE", 1))
def begin(**options):
    torch.sim.set_device(rank)
    dist.init_process_group("cpu:gloo,sim:simccl", **options)
    return torch.device("sim", rank)
"""
exec(COMMON.split("rank =", maxsplit=1)[0])


def script(code, *, world=2, env=None, timeout=100):
    """Run code on each rank; return the processes, ended, with their output as ``out``."""
    port = str(20000 + os.getpid() * 7 % 20000 + int(time.monotonic() * 10) % 500)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", COMMON + textwrap.dedent(code)],
            env={
                **os.environ,
                "RANK": str(r),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(world)
    ]
    for one in ranks:
        try:
            one.out, one.err = one.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for other in ranks:
                other.kill()
            one.out, one.err = one.communicate()
            one.err += "\nTIMED OUT"
    return ranks


def ended_well(ranks):
    assert [one.returncode for one in ranks] == [0] * len(ranks), "\n".join(
        r.out + r.err for r in ranks
    )
    return [one.out for one in ranks]


@pytest.mark.parametrize("fused", [False, True])
def test_training_gives_the_numbers_of_the_cpu(fused):
    optimizer = lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=fused)  # noqa: E731
    there = train(
        model().to("sim:1"), [(x.to("sim:1"), y.to("sim:1")) for x, y in batches()], optimizer
    )
    assert there == pytest.approx(train(model(), batches(), optimizer), abs=1e-6)


def test_mixed_devices_and_wrong_shapes_raise_at_the_call():
    one = torch.ones(2, 3, device="sim:0")
    for other in (torch.ones(2, 3), torch.ones(2, 3, device="sim:1")):
        with pytest.raises(RuntimeError, match="same device"):
            one + other
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        one @ one


def test_host_cannot_read_device_memory():
    code = (
        "import torch, ctypes; t = torch.ones(4, device='sim'); ctypes.string_at(t.data_ptr(), 4)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGSEGV
    with pytest.raises(TypeError, match="sim"):
        torch.ones(1, device="sim").numpy()


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


def test_random_numbers_are_of_the_device():
    torch.manual_seed(3)
    state, host = torch.sim.get_rng_state(), torch.get_rng_state()
    first = torch.rand(5, device="sim"), nn.functional.dropout(torch.ones(50, device="sim"))
    assert torch.equal(torch.get_rng_state(), host)
    torch.sim.set_rng_state(state)
    second = torch.rand(5, device="sim"), nn.functional.dropout(torch.ones(50, device="sim"))
    assert all(map(torch.equal, first, second))
    own = torch.Generator("sim:1").manual_seed(1)
    assert torch.rand(3, device="sim:1", generator=own).device.index == 1


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
    out = ended_well(script(code, world=1))[0]
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
    assert "Cannot re-initialize SIM in forked subprocess" in ended_well(script(code, world=1))[0]


def test_asking_for_devices_makes_no_context(tmp_path):
    log = tmp_path / "log"
    code = """
    torch.accelerator.is_available(), torch.accelerator.device_count(), torch.manual_seed(1)
    torch.accelerator.current_accelerator()
    assert not torch.sim.is_initialized()
    """
    ended_well(script(code, world=1, env={"SIM_CONTEXT_LOG": str(log)}))
    assert not log.exists()


def test_pinned_memory_and_asynchronous_copies():
    pinned = torch.arange(8.0).pin_memory()
    assert pinned.is_pinned()
    assert not torch.arange(8.0).is_pinned()
    there = pinned.to("sim", non_blocking=True)
    back = torch.empty(8).pin_memory().copy_(there, non_blocking=True)
    torch.sim.synchronize()
    assert torch.equal(back, pinned)
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, pin_memory=True)
    assert next(iter(loader)).is_pinned()


def test_each_collective():
    code = """
    device = begin()
    mine = torch.full((2,), float(rank + 1), device=device)
    def check(tensor, expected):
        assert tensor.tolist() == expected, (tensor, expected)
    one = mine.clone(); dist.all_reduce(one); check(one, [3, 3])
    one = mine.clone(); dist.broadcast(one, 1); check(one, [2, 2])
    one = mine.clone(); dist.reduce(one, 0); rank or check(one, [3, 3])
    many = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(many, mine); check(torch.stack(many), [[1, 1], [2, 2]])
    whole = torch.empty(4, device=device)
    dist.all_gather_into_tensor(whole, mine); check(whole, [1, 1, 2, 2])
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, whole); check(part, [2 + 2 * rank] * 2)
    dist.reduce_scatter(part, [mine, mine]); check(part, [3, 3])
    out = torch.empty_like(mine); dist.all_to_all_single(out, mine); check(out, [1, 2])
    outs = [torch.empty(1, device=device) for _ in range(2)]
    dist.all_to_all(outs, list(mine.chunk(2))); check(torch.cat(outs), [1, 2])
    dist.gather(mine, many if rank == 0 else None)
    dist.scatter(out, many if rank == 0 else None); check(out, [rank + 1] * 2)
    if rank: dist.send(mine, 0)
    else: dist.recv(out, 1); check(out, [2, 2])
    ops = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)]
    [work.wait() for work in dist.batch_isend_irecv(ops)]; check(out, [2 - rank] * 2)
    objects = [None, None]; dist.all_gather_object(objects, {"rank": rank})
    assert objects[1] == {"rank": 1}
    half = mine.bfloat16(); dist.all_reduce(half, op=dist.ReduceOp.AVG); check(half, [1.5, 1.5])
    dist.barrier()
    group = dist.new_group([0, 1]); dist.all_reduce(one, group=group)
    dist.destroy_process_group()
    """
    ended_well(script(code))


def test_host_runs_ahead_of_collectives_until_it_reads():
    code = """
    device = begin()
    one = torch.ones(1, device=device); dist.all_reduce(one); one += 1; one.item()
    dist.barrier()
    if rank: time.sleep(2)
    began = time.monotonic()
    dist.all_reduce(one); one += 1
    launched = time.monotonic() - began
    assert one.item() == 7
    print(launched, time.monotonic() - began)
    dist.destroy_process_group()
    """
    launched, read = map(float, ended_well(script(code))[0].split())
    assert launched < 0.5
    assert read > 1.5


def test_watchdog_ends_a_rank_that_waits_too_long():
    code = """
    device = begin(timeout=timedelta(seconds=2))
    one = torch.ones(1, device=device); dist.all_reduce(one); one.item()
    if rank == 0:
        dist.all_reduce(one); one.item()
    time.sleep(5)
    """
    ranks = script(code)
    assert ranks[0].returncode == -signal.SIGABRT
    assert re.search(
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=2, OpType=ALLREDUCE",
        ranks[0].err,
    )


def test_abort_frees_the_device():
    code = """
    device = begin()
    one = torch.ones(1, device=device); dist.all_reduce(one); one.item()
    if rank == 0:
        import threading
        dist.all_reduce(one)
        threading.Timer(1, dist.distributed_c10d._abort_process_group).start()
        began = time.monotonic(); one.item(); print(time.monotonic() - began)
    """
    outs = ended_well(script(code))
    assert 0.5 < float(outs[0].split()[-1]) < 5
