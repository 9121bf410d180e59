"""A rank on the CPU drops its model after its group, as plain functions do, and never hangs."""

import contextlib
import os
import socket
import sys
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from notebook_accel.launch.worker import torch_fixes
from notebook_accel.private import of_torch
from notebook_accel.rank import group_store
from tests.launches import on_cpu


def test_a_backward_leaves_nothing_that_needs_the_gil():
    def train():
        distributed.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        stashed = []

        def look(grad):
            stashed.append(torch._C._is_key_in_tls("context"))

        model.module.weight.register_hook(look)
        model(torch.ones(2, 4)).sum().backward()
        distributed.destroy_process_group()
        return stashed == [False]

    assert on_cpu(train).results == [True, True]


def in_a_process(act):
    """Whether ``act`` gave True in a fork of this process, where torch may be changed."""
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if act() else 1
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class SlowStore(distributed.Store):
    """The store of one group, at which one rank looks addresses up late, or when ``made`` exists.

    Args:
        file: where it keeps its keys.
        made: what the other rank makes as soon as it has the group.
        is_late: whether this rank is the late one.
    """

    def __init__(self, file, made, *, is_late):
        super().__init__()
        self.files = distributed.FileStore(str(file), 2)
        self.made = made
        self.is_late = is_late
        self.came_last = False

    def get(self, key):
        deadline = time.monotonic() + 0.2
        while self.is_late and not self.came_last and time.monotonic() < deadline:
            time.sleep(0.01)
            self.came_last = self.made.exists()
        return self.files.get(key)

    def set(self, key, value):
        self.files.set(key, value)

    def add(self, key, value):
        return self.files.add(key, value)

    def wait(self, keys, *timeout):
        self.files.wait(keys, *timeout)

    def clone(self):
        return self


def make_groups(folder):
    """The numbers of those that this rank was still making when the other had them."""
    rank = int(os.environ["RANK"])
    came_last = []
    # Which of the two connects to the other, and so may be the first, is drawn by lot.
    for number in range(6):
        made = folder / f"made {number}"
        store = SlowStore(folder / f"store {number}", made, is_late=rank == number % 2)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        if not store.is_late:
            made.touch()
        distributed.destroy_process_group()
        if store.came_last:
            came_last.append(number)
    return came_last


def test_a_rank_has_its_group_once_all_have_it(tmp_path):
    """Or it would destroy it under the other: "Connection closed by peer" there."""
    assert on_cpu(make_groups, tmp_path).results == [[], []]


def test_a_group_that_could_not_be_made_is_not_counted():
    """Torch 2.13 counts it, which is the flaw; the fix leaves a group that was made alone."""

    def act():
        world = distributed.distributed_c10d._world
        timeout = timedelta(seconds=0.1)
        with contextlib.suppress(distributed.DistError):
            distributed.init_process_group(
                "gloo", store=distributed.HashStore(), rank=0, world_size=2, timeout=timeout
            )
        counted = world.group_count
        of_torch.forget_half_made_groups()
        forgotten = world.group_count
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        of_torch.forget_half_made_groups()
        return counted == 1 and forgotten == 0 and world.group_count == 1

    assert in_a_process(act)


def test_a_store_whose_arguments_all_go_by_position(monkeypatch):
    """A second store of one process joins the server of the first, whatever was asked for."""
    given = []

    class Store:
        def __init__(self, *args, **kwargs):
            given.append((args, kwargs))

    plain = Store
    plain.__init__ = torch_fixes._listening(plain.__init__)
    place = ("localhost", 4321, 2, True, timedelta(seconds=1), False)
    with socket.socket() as bound:
        monkeypatch.setitem(torch_fixes._bound, 4321, bound)
        monkeypatch.setattr(group_store, "is_served", lambda port: port == 4321)
        Store(*place, False)
        Store(*place)
    assert given == [(place, {"multi_tenant": True})] * 2


def test_one_variable_leaves_torch_as_it_is(monkeypatch):
    def look():
        distributed.init_process_group("gloo")
        number = torch.ones(1)
        distributed.all_reduce(number)
        distributed.destroy_process_group()
        rendezvous = sys.modules["torch.distributed.rendezvous"]
        functions = (
            *(torch._C._stash_obj_in_tls, distributed_c10d._new_process_group_helper),
            *(rendezvous._create_c10d_store, distributed.TCPStore.__init__),
        )
        codes = [getattr(function, "__code__", None) for function in functions]
        files = [code.co_filename for code in codes if code is not None]
        return sum(file.endswith("launch/worker/torch_fixes.py") for file in files), int(number)

    assert on_cpu(look)[0] == (4, 2)
    monkeypatch.setenv("NOTEBOOK_ACCEL_TORCH_FIXES", "0")
    assert on_cpu(look).results == [(0, 2)] * 2


def test_the_port_for_a_store_of_torchs_own_is_free_at_all_addresses(monkeypatch):
    """Torch binds it at all: a connection from another address would be in its way."""

    def taken():
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.2", int(os.environ["MASTER_PORT"])))

    monkeypatch.setenv("NOTEBOOK_ACCEL_TORCH_FIXES", "0")
    on_cpu(taken)


def test_rank_0_says_in_lines_what_of_torch_could_not_be_replaced():
    def train():
        # Another torch: one name is gone, and one has another parameter first.
        del torch._C._stash_obj_in_tls
        rendezvous = sys.modules["torch.distributed.rendezvous"]
        plain = rendezvous._create_c10d_store
        rendezvous._create_c10d_store = lambda url, *rest: plain(url, *rest)  # noqa: PLW0108
        torch_fixes.avoid_hang_when_model_outlives_group()
        of_torch.replace_store_maker(torch_fixes._meeting)
        distributed.init_process_group("gloo")
        number = torch.ones(1)
        distributed.all_reduce(number)
        return int(number)

    run = on_cpu(train)
    assert run.results == [2, 2]
    assert "as notebook_accel knows it" not in run.logs(1)
    lines = [line for line in run.logs(0).splitlines() if "as notebook_accel knows it" in line]
    assert all(f"torch {torch.__version__} has no " in line for line in lines), lines
    names = [line.partition(" has no ")[2].partition(" ")[0] for line in lines]
    assert names == ["_stash_obj_in_tls", "_create_c10d_store"]
