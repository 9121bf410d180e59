"""Trainings on torch_xla come to what one process on the CPU comes to, on one rank and on two."""

from typing import Any

import pytest
import torch

from notebook_accel.config import LaunchConfig
from tests.launches import launch
from tests.xla.functions import new_model, train

CASES: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "SGD"},
    "adamw": {"kind": "AdamW"},
    "clipped": {"kind": "AdamW", "clips": True},
    "accumulated": {"kind": "AdamW", "num_steps": 2},
    "accumulated and clipped": {"kind": "AdamW", "num_steps": 2, "clips": True},
    "unprepared optimizer": {"kind": "AdamW", "is_bare": True},
}


def run_all(engine: str, cases: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    """What each rank comes to in all cases, in one launch."""
    model = new_model()

    def train_all() -> dict[str, Any]:
        return {name: train(model, **options) for name, options in cases.items()}

    config = LaunchConfig(engine=engine, **settings)
    return launch(train_all, (), config=config).results


@pytest.fixture(scope="module")
def twin() -> dict[str, Any]:
    (alone,) = run_all("local", CASES, num_processes=1, devices="cpu")
    return alone


def assert_same(ranks: list[dict[str, Any]], twin: dict[str, Any], within: float = 1e-5) -> None:
    for name, (losses, weights) in twin.items():
        for rank in ranks:
            assert rank[name][0] == pytest.approx(losses, abs=within), name
            assert all(map(torch.equal, rank[name][1], ranks[0][name][1])), name
            for own, others in zip(rank[name][1], weights, strict=True):
                assert torch.allclose(own, others, atol=within), name


@pytest.mark.timeout(600)
def test_one_rank(twin: dict[str, Any]) -> None:
    assert_same(run_all("xla", CASES), twin)


@pytest.mark.timeout(600)
def test_two_ranks(twin: dict[str, Any], two_ranks: int) -> None:
    ranks = run_all("xla", CASES)
    assert len(ranks) == two_ranks
    assert_same(ranks, twin)


@pytest.mark.timeout(600)
def test_bf16(twin: dict[str, Any], two_ranks: int) -> None:
    """Eight bits of a number's twenty-four are left; losses are about 1."""
    ranks = run_all("xla", {"sgd": {"kind": "SGD", "precision": "bf16"}})
    assert_same(ranks, {"sgd": twin["sgd"]}, within=0.03)
