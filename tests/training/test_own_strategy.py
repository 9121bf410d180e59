"""A strategy that a user wrote (``own_strategy``) trains, accumulates, saves and resumes as DDP."""

import pytest

from tests.training import meshes, own_strategy
from tests.training.harness import on_ranks
from tests.training.resuming import train

SAVES_AT = 4


@on_ranks(2)
def test_a_users_own_strategy_trains_saves_and_resumes(tmp_path):
    own_strategy.register()
    meshes.LAYOUTS["own"] = (2, 2, lambda: {"plain_plugin": own_strategy.PlainPlugin()})
    whole, resumed, by_ddp = (
        train(tmp_path / name, layout, samples=16, saves=lambda number: number == SAVES_AT)
        for name, layout in (("own", "own"), ("own", "own"), ("ddp", None))
    )
    of_rest = list(whole["losses"].items())[SAVES_AT:]
    assert list(resumed["losses"].items()) == of_rest
    assert whole["losses"] == pytest.approx(by_ddp["losses"], rel=1e-5)
