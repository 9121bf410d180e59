"""A strategy that is not of this package, as a user would write it; the docs show this file.

Each rank has the full model. The gradient of a weight is averaged over the ranks as soon as
backward has it, without buckets and without a wrapper: DDP in its simplest form.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from notebook_accel.training import strategies


@dataclass
class PlainPlugin(strategies.StrategyPlugin):
    """``Accelerator(plain_plugin=PlainPlugin())`` chooses the strategy; its settings go here."""

    switch = "USE_PLAIN"  # or ACCELERATE_USE_PLAIN=true in the environment
    sums: bool = False


class PlainDataParallel(strategies.Strategy):
    def __init__(self, request: strategies.Request) -> None:
        super().__init__(request)
        self.plugin: PlainPlugin = request.plugins["plain_plugin"]
        self.exchanges = True

    def prepare_model(self, given: strategies.ModelToPrepare) -> Any:
        model = super().prepare_model(given)  # on its device, compiled
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
        for weight in model.parameters() if given.training else ():
            weight.register_post_accumulate_grad_hook(self.average)
        return model

    def average(self, weight: torch.Tensor) -> None:
        if self.exchanges and weight.grad is not None:
            dist.all_reduce(weight.grad)
            if not self.plugin.sums:
                weight.grad /= self.topology.num_processes

    @contextmanager
    def gradient_sync(self, model: Any, enabled: bool) -> Iterator[None]:
        before, self.exchanges = self.exchanges, enabled
        try:
            yield
        finally:
            self.exchanges = before


def register() -> None:
    """Put the strategy before the others, of which the first that is asked for is taken."""
    strategies.PLUGIN_ARGUMENTS["plain_plugin"] = PlainPlugin
    choice = strategies.Choice(
        lambda request: "plain_plugin" in request.plugins, __name__, PlainDataParallel.__name__
    )
    strategies.STRATEGIES = {"plain": choice, **strategies.STRATEGIES}
