"""What the tests of training share."""

import sys

import pytest
import torch

from tests.training.single import forget_states, fresh_rank  # noqa: F401


@pytest.fixture(scope="package", autouse=True)
def _one_thread():
    """One thread for the single process: on busy cores a second one waits in a loop."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _fresh_peer():
    """Nothing that Accelerate keeps in this process from an earlier test, of another file maybe."""
    if "accelerate.state" in sys.modules:
        forget_states(sys.modules["accelerate"])
