"""The articles' loops on torch_xla, with nothing changed but the import."""

import pytest
import transformers

from notebook_accel.config import LaunchConfig
from tests.launches import launch
from tests.training.test_seeds import train_all


@pytest.mark.timeout(600)
def test_on_two_ranks(two_ranks, tmp_path):
    def train():
        # Ranks that are threads get it with the function; two that import it at once may fail.
        assert transformers.__version__
        # fp16 is for GPUs, and refused here.
        train_all(str(tmp_path), "bf16")

    run = launch(train, (), config=LaunchConfig(engine="xla"))
    assert len(list(run)) == two_ranks
    bars = {(bar.rank, bar.n, bar.total) for bar in run.progress}
    assert {(0, 6, 6), (1, 6, 6)} <= bars, "those of the full training"
