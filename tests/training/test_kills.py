"""A rank that is killed at a random instant: a few of the instants of ``make test-kills``."""

import pytest

from tests.kills import CASES, run_case
from tests.training.harness import skip_unless_it_runs
from tests.training.meshes import LAYOUTS

# Of layouts with and without a loss scale those with it: the rest takes the same way.
SHORT = ["ddp, fp16", "ddp, async", "fsdp2, fp16", "fsdp2, async", "1F1B"]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHORT)
def test_a_killed_training_goes_on_as_if_nothing_had_been(name, tmp_path):
    skip_unless_it_runs(name)
    report = run_case(name, 1, seed=7, root=tmp_path, samples=12)
    assert report["kills"] == 1
    assert report["broken"] == []
    assert report["differing"] == []
    ranks = LAYOUTS[CASES[name][0]][0]
    assert report["num_losses"] == report["trainings"] * ranks * 12, (
        "each rank has each of its losses"
    )
