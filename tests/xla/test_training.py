"""Trainings on torch_xla come to what one process on the CPU comes to, on one rank and on two."""

import pytest
import torch

from notebook_accel.config import LaunchConfig
from tests.launches import launch
from tests.xla.functions import new_model, train

CASES = {
    "sgd": {"kind": "SGD"},
    "adamw": {"kind": "AdamW"},
    "clipped": {"kind": "AdamW", "clips": True},
    "accumulated": {"kind": "AdamW", "num_steps": 2},
    "accumulated and clipped": {"kind": "AdamW", "num_steps": 2, "clips": True},
    "unprepared optimizer": {"kind": "AdamW", "is_bare": True},
}


def run_all(engine, cases, **settings):
    """What each rank comes to in all cases, in one launch."""
    model = new_model()

    def train_all():
        return {name: train(model, **options) for name, options in cases.items()}

    config = LaunchConfig(engine=engine, **settings)
    return launch(train_all, (), config=config).results


@pytest.fixture(scope="module")
def twin():
    (alone,) = run_all("local", CASES, num_processes=1, devices="cpu")
    return alone


def assert_same(ranks, twin, within=1e-5):
    for name, (losses, weights) in twin.items():
        for rank in ranks:
            assert rank[name][0] == pytest.approx(losses, abs=within), name
            assert all(map(torch.equal, rank[name][1], ranks[0][name][1])), name
            for own, others in zip(rank[name][1], weights, strict=True):
                assert torch.allclose(own, others, atol=within), name


@pytest.mark.timeout(600)
def test_one_rank(twin):
    assert_same(run_all("xla", CASES), twin)


@pytest.mark.timeout(600)
def test_two_ranks(twin, two_ranks):
    ranks = run_all("xla", CASES)
    assert len(ranks) == two_ranks
    assert_same(ranks, twin)


@pytest.mark.timeout(600)
def test_bf16(twin, two_ranks):
    """Eight bits of a number's twenty-four are left; losses are about 1."""
    ranks = run_all("xla", {"sgd": {"kind": "SGD", "precision": "bf16"}})
    assert_same(ranks, {"sgd": twin["sgd"]}, within=0.03)
