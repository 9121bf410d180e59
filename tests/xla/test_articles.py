"""The articles' loops on torch_xla, with nothing changed but the import."""

import json

import pytest
import transformers

from notebook_accel.config import LaunchConfig
from tests.launches import launch
from tests.training.test_seeds import all_loops, assert_trained
from tests.xla.plain import run

# fp16 is for GPUs, and refused here.
SCRIPT = """
import json, sys
from notebook_accel import Accelerator
from tests.training.test_seeds import all_loops
assert Accelerator().device.type == "xla"
print(json.dumps(all_loops(sys.argv[1], "bf16")))
"""


@pytest.mark.timeout(600)
def test_in_plain_python(tmp_path):
    told = run(SCRIPT, str(tmp_path)).stdout.splitlines()
    found = json.loads(told[-1])
    found["full"]["evaluated"] = int(found["full"]["evaluated"])
    found["notes"]["steps"] = tuple(found["notes"]["steps"])
    assert_trained([found])


@pytest.mark.timeout(600)
def test_on_two_ranks(two_ranks, tmp_path):
    def train():
        # Ranks that are threads get it with the function; two that import it at once may fail.
        assert transformers.__version__
        return all_loops(str(tmp_path), "bf16")

    run = launch(train, (), config=LaunchConfig(engine="xla"))
    assert len(run.results) == two_ranks
    assert_trained(run.results)
    bars = {(bar.rank, bar.n, bar.total) for bar in run.progress}
    assert {(0, 6, 6), (1, 6, 6)} <= bars, "those of the full training"
