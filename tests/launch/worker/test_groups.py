"""How a rank finds the connections on which other ranks may wait, and leaves its groups."""

import os
import resource
import threading
import time

from torch import distributed

from notebook_accel.launch.worker import groups
from tests.launch.worker.test_torch_fixes import in_a_process


def make_group(backend):
    """A group of gloo of which torch says that it is of ``backend``."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    world = distributed.distributed_c10d._world
    world.pg_backend_config[distributed.group.WORLD] = backend


def test_groups_of_nccl_are_aborted_and_those_of_gloo_are_not():
    """Torch's own abort, which forgets the groups; what it does to NCCL takes two GPUs to see."""

    def act():
        make_group("cpu:gloo")
        groups.disconnect()
        is_left = distributed.is_initialized()
        distributed.destroy_process_group()
        make_group("cpu:gloo,cuda:nccl")
        groups.disconnect()
        return is_left and not distributed.is_initialized()

    assert in_a_process(act)


def test_an_abort_that_waits_for_other_ranks_is_left_to_go_on():
    """It is not begun twice, nor is the group destroyed under it; the next call waits again."""
    begun = []
    others = threading.Event()

    def abort():
        begun.append(1)
        others.wait(30)
        distributed.destroy_process_group()

    def act():
        make_group("cpu:gloo,cuda:nccl")
        groups._ABORT_SECONDS = 0.05
        vars(distributed.distributed_c10d)["_abort_process_group"] = abort
        groups.disconnect()
        groups.close_group()
        is_left = distributed.is_initialized()
        others.set()
        groups._ABORT_SECONDS = 30
        groups.disconnect()
        return is_left and not distributed.is_initialized() and begun == [1]

    assert in_a_process(act)


def test_a_group_of_nccl_that_is_not_through_keeps_no_rank():
    """A rank has queued what no other has: destroying the group would take for ever."""

    def act():
        make_group("cpu:gloo,cuda:nccl")
        vars(distributed)["destroy_process_group"] = lambda: time.sleep(60)
        began = time.monotonic()
        groups.close_group_within(0.05)
        return time.monotonic() - began < 30

    assert in_a_process(act)


def test_a_function_that_left_no_descriptor_and_no_port_ends_no_rank(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "any")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = os.dup(0)
    os.close(unused)
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused, hard))
    try:
        groups.disconnect()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
