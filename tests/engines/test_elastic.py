"""Ranks on several machines keep the contract; machines join by a token, and by it alone."""

from __future__ import annotations

import pytest

from notebook_accel.launch import engines
from tests.engines import joined
from tests.engines.contract import EngineContract


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.ENGINES, joined.NAME, joined.JoinedEngine)


class TestElastic(EngineContract):
    engine = joined.NAME
    prelude = "from tests.engines.joined import register; register()"

    # What the template or one rank does by itself is the same behind any number of agents.
    test_a_stopped_template_is_replaced = None
    test_launch_error_when_the_template_dies_while_forking = None
    test_a_dead_template_hurts_no_run_and_the_next_launch_makes_a_new_one = None
    test_what_is_left_to_do_after_the_return_is_bounded = None
    test_a_daemon_of_a_rank_outlives_other_ranks_and_not_its_own = None
