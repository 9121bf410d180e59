"""A rank on the CPU drops its model after its group, as plain functions do, and never hangs."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed

from notebook_accel.config import LaunchConfig
from notebook_accel.launch.launcher import launch
from notebook_accel.launch.view import View
from notebook_accel.launch.worker import torch_fixes

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_backward_leaves_nothing_that_needs_the_gil() -> None:
    def train() -> bool:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        stashed = []

        def look(grad: torch.Tensor) -> None:
            stashed.append(torch._C._is_key_in_tls("context"))

        model.module.weight.register_hook(look)
        model(torch.ones(2, 4)).sum().backward()
        dist.destroy_process_group()
        return stashed == [False]

    config = LaunchConfig(num_processes=2, devices="cpu")
    assert launch(train, config=config, view=View()).results == [True, True]


def in_a_process(act: Callable[[], bool]) -> bool:
    """Whether ``act`` gave True in a fork of this process, where torch may be changed."""
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if act() else 1
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_every_new_group_is_noted() -> None:
    def act() -> bool:
        noted: list[bool] = []

        def making() -> contextlib.AbstractContextManager[None]:
            noted.append(distributed.is_initialized())
            return contextlib.nullcontext()

        torch_fixes.watch_new_groups(making)
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        first = len(noted)
        distributed.new_group([0])
        return (first, len(noted)) == (1, 2)

    assert in_a_process(act)


def test_a_group_that_could_not_be_made_is_not_counted() -> None:
    """Torch 2.13 counts it, which is the flaw; the fix leaves a group that was made alone."""

    def act() -> bool:
        world: Any = distributed.distributed_c10d._world
        timeout = timedelta(seconds=0.1)
        with contextlib.suppress(distributed.DistError):
            distributed.init_process_group(
                "gloo", store=distributed.HashStore(), rank=0, world_size=2, timeout=timeout
            )
        counted = world.group_count
        torch_fixes.forget_half_made_groups()
        forgotten = world.group_count
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        torch_fixes.forget_half_made_groups()
        return counted == 1 and forgotten == 0 and world.group_count == 1

    assert in_a_process(act)
