"""The accelerator of this machine: a GPU, or the simulated one of ``make test-accelerator``."""

import pytest
import torch


@pytest.fixture
def kind():
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device.type
