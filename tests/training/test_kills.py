"""A rank that is killed at a random instant: a few of the instants of ``make test-kills``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kills import CASES, run_case

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_killed_training_goes_on_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    report = run_case(name, 1, seed=7, root=tmp_path)
    assert report["broken"] == []
    assert report["differing"] == []
    assert report["num_losses"] == 2 * 24, "each rank has each of its losses"
