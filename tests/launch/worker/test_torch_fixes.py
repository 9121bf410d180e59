"""A rank on the CPU drops its model after its group, as plain functions do, and never hangs."""

from __future__ import annotations

from notebook_accel.config import LaunchConfig
from notebook_accel.launch.launcher import launch
from notebook_accel.launch.view import View


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
