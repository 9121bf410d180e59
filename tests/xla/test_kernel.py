"""From a real kernel: a function of a cell, twice in a row; the kernel never imports torch_xla."""

import json
import re
from pathlib import Path

import pytest

from tests.notebook.kernels import kernel_manager

TRAIN = """
import torch
from notebook_accel import Accelerator, notebook_launcher

features, labels = torch.randn(32, 4), torch.randn(32, 1)

def train(lr):
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    dataset = torch.utils.data.TensorDataset(features, labels)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in accelerator.progress(loader, "batches"):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss})
    return accelerator.process_index, str(accelerator.device), model.weight.detach()
"""
ASK = """
import sys
print([rank[:2] for rank in run], torch.equal(run[0][2], run[1][2]), run[0][2].device)
print(len(run.metrics) > 0, "torch_xla" in sys.modules)
print([(bar.rank, bar.name, bar.n, bar.total) for bar in run.progress])
"""


@pytest.fixture
def kernel(two_ranks):
    with kernel_manager() as manager:
        manager.start_kernel()
        client = manager.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            yield client
        finally:
            client.stop_channels()


def execute(client, code):
    """What a cell prints; an error of it is raised."""
    said = []

    def hear(message):
        content = message["content"]
        said.append(content.get("text", "") or "\n".join(content.get("traceback", ())))

    reply = client.execute_interactive(code, timeout=300, output_hook=hear)
    assert reply["content"]["status"] == "ok", "".join(said)
    return "".join(said)


@pytest.mark.timeout(600)
def test_a_function_of_a_cell_twice(kernel):
    execute(kernel, TRAIN)
    for _ in range(2):
        execute(kernel, 'run = notebook_launcher(train, (0.1,), engine="xla", view="text")')
        told = execute(kernel, ASK)
        assert "[(0, 'xla:0'), (1, 'xla:1')] True cpu" in told
        assert "True False" in told
        assert "[(0, 'batches', 4.0, 4.0), (1, 'batches', 4.0, 4.0)]" in told


@pytest.mark.timeout(600)
def test_an_error_names_the_line_of_the_cell(kernel):
    execute(kernel, "from notebook_accel import notebook_launcher")
    execute(kernel, "def fail(lr):\n    missing = {}\n    return missing[lr]")
    with pytest.raises(AssertionError) as caught:
        execute(kernel, 'notebook_launcher(fail, (0.1,), engine="xla", view="text")')
    assert "KeyError: 0.1" in str(caught.value)
    assert re.search(r"Cell In\[2\], line 3, in fail", str(caught.value))


@pytest.mark.timeout(600)
def test_the_notebook_for_tpus(kernel):
    """Its cells after the installation; on the CPU device the engine is not chosen by itself."""
    execute(kernel, "%env NOTEBOOK_ACCEL_ENGINE=xla")
    path = Path(__file__).parents[2] / "notebooks" / "tpu_colab.ipynb"
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "%pip install" in code[0]
    told = [execute(kernel, each) for each in code[1:]]
    found = re.search(r"2 ranks, accuracy ([\d.]+)", told[-1])
    assert found, told[-1]
    assert float(found[1]) > 0.8


@pytest.mark.timeout(600)
def test_cells_of_a_session_are_refused_where_ranks_share_a_process(kernel):
    execute(kernel, "%load_ext notebook_accel\n%env NOTEBOOK_ACCEL_ENGINE=xla")
    with pytest.raises(AssertionError, match="a session needs a process for each rank"):
        execute(kernel, "%%accelerate\nmine = rank")
