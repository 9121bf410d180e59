"""torch_tpu itself, where it is installed (``make test-torch-tpu``), without a TPU."""

import os
from importlib.util import find_spec

import pytest

from notebook_accel import LaunchError, tpu
from tests.interpreters import run_script

pytestmark = [
    pytest.mark.skipif(find_spec("torch_tpu") is None, reason="torch_tpu: make test-torch-tpu"),
    pytest.mark.timeout(300),
]

# Loaded as a rank loads it.
NAMES = """
import inspect, os
from notebook_accel import tpu
# As the template does, before a rank has its own variables.
os.environ[tpu.AUTOLOAD] = "0"
import torch
assert not hasattr(torch, "tpu")
del os.environ[tpu.AUTOLOAD]
tpu.load_backends()
ask = torch.tpu.distributed.set_tpu_launch_env
print("nproc_per_node" in inspect.signature(ask).parameters, hasattr(ask, "__deprecated__"))
print(torch.accelerator.is_available())
"""
KERNEL = """
from notebook_accel import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator()
    return str(accelerator.device), accelerator.num_processes

print(notebook_launcher(train, num_processes=2, view="none").results)
"""


def run(script):
    return run_script(script, timeout=280).splitlines()


def test_what_the_package_uses_is_there():
    assert run(NAMES) == ["True False", "False"]


def test_the_error_without_a_tpu():
    with pytest.raises(LaunchError, match=r"could not prepare 2 ranks: ValueError: .*TPU"):
        tpu.launch_variables(os.environ, 2)


def test_ranks_train_on_the_cpu_where_there_is_no_tpu():
    assert run(KERNEL)[-1] == "[('cpu', 2), ('cpu', 2)]"
