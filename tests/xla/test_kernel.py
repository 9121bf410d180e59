"""From a real kernel: a function of a cell, twice in a row; the kernel never imports torch_xla."""

import json
import re
from pathlib import Path

import pytest

from tests.kernel.notebooks import open_notebook

pytestmark = pytest.mark.timeout(600)

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
def book(two_ranks):
    with open_notebook() as notebook:
        yield notebook


def test_a_function_of_a_cell_twice_and_an_error_names_its_line(book):
    book.run(TRAIN)
    for _ in range(2):
        launch = 'run = notebook_launcher(train, (0.1,), engine="xla", view="text")'
        book.run(launch, timeout=300)
        told = book.run(ASK)
        assert "[(0, 'xla:0'), (1, 'xla:1')] True cpu" in told
        assert "True False" in told
        assert "[(0, 'batches', 4.0, 4.0), (1, 'batches', 4.0, 4.0)]" in told
    text = book.fails(launch.replace("0.1", "None"), timeout=300)
    assert re.search(r"Cell In\[1\], line \d+, in train\n    optimizer = ", text)


def test_the_notebook_for_tpus(book):
    """Its cells after the installation; on the CPU device the engine is not chosen by itself."""
    book.run("%env NOTEBOOK_ACCEL_ENGINE=xla")
    path = Path(__file__).parents[2] / "notebooks" / "tpu_colab.ipynb"
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "%pip install" in code[0]
    told = [book.run(each, timeout=300) for each in code[1:]]
    found = re.search(r"2 ranks, accuracy ([\d.]+)", told[-1])
    assert found, told[-1]
    assert float(found[1]) > 0.8


def test_cells_of_a_session_are_refused_where_ranks_share_a_process(book):
    book.run("%load_ext notebook_accel\n%env NOTEBOOK_ACCEL_ENGINE=xla")
    text = book.fails("%%accelerate\nmine = rank")
    assert "a session needs a process for each rank" in text
