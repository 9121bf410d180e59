"""A model that was spread comes back as it was made: an empty copy of it takes whole weights."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accel.training.precision import AutocastForward
from notebook_accel.training.preparing.state_after_stop import copy_on_meta, fill


class Reader(nn.Module):
    """Tied weights, buffers of both kinds, a weight that is not trained, and torch's own lists."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.recurrent = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.words = ["a", "b"]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.norm(self.embed(tokens)) * self.frozen)
        return self.head(hidden) * self.scale


def doubled(_module: nn.Module, _args: Any, outputs: torch.Tensor) -> torch.Tensor:
    return 2 * outputs


def test_it_is_the_model_again_once_it_has_the_weights() -> None:
    tokens = torch.tensor([0, 3, 1])
    model = Reader()
    model.register_forward_hook(doubled)
    meta_copy = copy_on_meta(model)
    assert meta_copy is not None
    assert all(weight.is_meta for weight in meta_copy.parameters())
    # What is done to the model from here on, as a strategy does, is nothing to the meta copy.
    cast = AutocastForward(model, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    model.__dict__["forward"] = cast
    model.head.register_forward_hook(doubled)
    model.recurrent = nn.Identity()  # type: ignore[assignment]
    trained = Reader()
    trained.register_forward_hook(doubled)
    trained(tokens)  # moves the averages of the norm
    made: Any = pickle.loads(pickle.dumps(meta_copy))
    fill(made, trained.state_dict())
    assert type(made) is Reader
    assert made.head.weight is made.embed.weight
    assert not made.frozen.requires_grad
    assert made.words == ["a", "b"]
    assert torch.equal(made.eval()(tokens), trained.eval()(tokens))


def test_weights_of_another_kind_and_other_weights_are_refused() -> None:
    class Own(nn.Parameter):
        pass

    model = nn.Linear(1, 1)
    meta_copy = copy_on_meta(model)
    assert meta_copy is not None
    with pytest.raises(KeyError):
        fill(meta_copy, {"bias": torch.zeros(1)})
    model.weight = Own(torch.zeros(1, 1))
    assert copy_on_meta(model) is None
