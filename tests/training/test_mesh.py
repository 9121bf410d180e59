"""Training over a device mesh equals the single process: shards, divided layers, replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training.harness import run_ranks
from tests.training.meshes import FLOAT_ERROR, MESHES, data, train, twin

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sgd, uneven end": {"optimizer": "sgd", "samples": 13},
    "accumulation, clipping a window": {"accumulate": 2, "clip": 0.05, "whole": True},
    "clipping by value": {"clip_value": 0.01, "optimizer": "sgd"},
}


def train_all(mesh: str) -> dict[str, Any]:
    return {name: train(mesh, case) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=MESHES)
def trained(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    ranks, _, _ = MESHES[request.param]
    return request.param, run_ranks(train_all, ranks, request.param)


@pytest.mark.parametrize("name", CASES)
def test_a_mesh_equals_one_process(name: str, trained: tuple[str, list[Any]]) -> None:
    mesh, results = trained
    _, shares, _ = MESHES[mesh]
    expected, steps = twin(shares, CASES[name]), 2 * 16 // shares
    for result in results:
        ours = result[name]
        assert ours["losses"] == pytest.approx(expected["losses"], abs=FLOAT_ERROR * steps)
        assert ours["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert ours["weights"].keys() == expected["weights"].keys()
        assert distance(ours, expected) <= FLOAT_ERROR * steps
        samples = data(CASES[name].get("samples", 16)).tensors[0].tolist()
        assert sorted(ours["samples"]) == sorted(2 * samples)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(
        (torch.tensor(value) - torch.tensor(other["weights"][name])).abs().max().item()
        for name, value in one["weights"].items()
    )
