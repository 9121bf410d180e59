"""Training by what inductor builds (``make test-inductor``): its C++ compiler takes a minute."""

import shutil

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator
from notebook_accel.training.strategies.compiling import DynamoBackend, TorchDynamoPlugin
from tests.training.harness import run_ranks
from tests.training.meshes import FLOAT_ERROR, check_run, train, twin

pytestmark = [
    # The compiler may have to begin anew, on a machine that does other things too.
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
]


def train_blocks(layout, cpu=True):
    """What a rank saw, and how many graphs its compiler got."""
    plugin = TorchDynamoPlugin(backend=DynamoBackend.INDUCTOR, use_regional_compilation=True)
    seen = train(layout, {"settings": {"dynamo_plugin": plugin, "cpu": cpu}})
    return seen, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def check(seen, num_graphs, shares):
    assert num_graphs == 3, "embedding, head, and one that stands for both blocks"
    # Fused products and sums are rounded at other places.
    check_run(seen, twin(shares, {}), {}, 10 * FLOAT_ERROR)


def test_what_inductor_builds_trains():
    imports = ("torch._inductor.compile_fx",)
    for result in run_ranks(train_blocks, 2, None, imports=imports, timeout=300):
        check(*result, 2)


def test_a_whole_model_is_built_too():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    prepared = Accelerator(cpu=True, dynamo_backend="inductor").prepare(model)
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), model(x))
