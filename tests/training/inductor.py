"""Training by what inductor builds (``make test-inductor``): its C++ compiler takes a minute."""

import shutil

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator
from notebook_accel.training.strategies.compiling import DynamoBackend, TorchDynamoPlugin
from tests.training.harness import run_ranks

pytestmark = [
    # The compiler may have to begin anew, on a machine that does other things too.
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
]


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Curves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Curve(), Curve()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def train_blocks(cpu=True):
    """The weights after three steps, without a compiler and with it; and how many graphs it got."""
    seen = {}
    for backend in (DynamoBackend.NO, DynamoBackend.INDUCTOR):
        plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=True)
        accelerator = Accelerator(cpu=cpu, dynamo_plugin=plugin)
        torch.manual_seed(2)
        model = Curves()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(3):
            inputs = torch.arange(6.0, device=accelerator.device).reshape(2, 3)
            inputs /= 1 + step + accelerator.process_index
            inputs.requires_grad_()  # as those of the second block: one graph stands for both
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        seen[str(backend)] = {name: value.tolist() for name, value in state.items()}
    return {**seen, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def test_what_inductor_builds_trains():
    for result in run_ranks(train_blocks, 2, imports=("torch._inductor.compile_fx",), timeout=300):
        assert result["graphs"] == 1
        for name, value in result["NO"].items():
            # Fused products and sums are rounded at other places.
            torch.testing.assert_close(result["INDUCTOR"][name], value, atol=1e-5, rtol=0)


def test_a_whole_model_is_built_too():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    prepared = Accelerator(cpu=True, dynamo_backend="inductor").prepare(model)
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), model(x))
