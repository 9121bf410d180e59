"""Weights that have several names: which they are, and how they become one again."""

from __future__ import annotations

import torch

from notebook_accel.training.models import retie_parameters, tied_names


def test_tied_weights_are_found_and_tied_again() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    ties = tied_names(model)
    assert ties == [["0.weight", "1.weight"]]
    for part in model:
        part.weight = torch.nn.Parameter(part.weight.to("meta"))
    retie_parameters(model, ties)
    assert model[0].weight is not model[1].weight
    model[1].weight = torch.nn.Parameter(torch.ones(3, 2))
    retie_parameters(model, ties)
    assert model[0].weight is model[1].weight
    assert model[0].weight.device.type == "cpu"
