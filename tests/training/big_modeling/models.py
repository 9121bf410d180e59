"""Small models with what makes large ones hard: blocks, ties, buffers of both kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    import random

__all__ = ["Block", "Language", "random_model", "values"]


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.second(torch.relu(self.first(x))))


class Language(nn.Module):
    """Embedding and head share their weight; ``scale`` is in no state dict."""

    def __init__(self, num_blocks: int = 2, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.Sequential(*(Block() for _ in range(num_blocks)))
        self.lmhead = nn.Linear(4, 10)
        self.register_buffer("scale", torch.tensor([2.0]), persistent=False)
        if tied:
            self.lmhead.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lmhead(self.layers(self.embed(x) * self.scale))


class _RandomBlock(nn.Module):
    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.first = nn.Linear(chance.randint(1, 8), chance.randint(1, 8))
        self.relu = nn.ReLU()
        self.second = nn.Linear(chance.randint(1, 8), chance.randint(1, 8))
        if chance.random() < 0.3:
            self.shift = nn.Parameter(torch.zeros(chance.randint(1, 9)))
        if chance.random() < 0.3:
            self.norm = nn.BatchNorm1d(chance.randint(1, 9))


_RandomBlock.__name__ = "Block"


def random_model(chance: random.Random) -> nn.Module:
    """A model of any shape, for sizes and maps alone."""
    model = nn.Module()
    if chance.random() < 0.3:
        model.start = nn.Parameter(torch.zeros(chance.randint(1, 9)))
    if chance.random() < 0.3:
        model.register_buffer("table", torch.zeros(chance.randint(1, 9)))
    model.embed = nn.Embedding(10, 4)
    model.layers = nn.ModuleList([_RandomBlock(chance) for _ in range(chance.randint(1, 4))])
    model.middle = nn.Sequential(nn.Linear(4, chance.randint(1, 9)), _RandomBlock(chance))
    model.lmhead = nn.Linear(4, 10, bias=chance.random() < 0.5)
    if chance.random() < 0.5:
        model.lmhead.weight = model.embed.weight
        if chance.random() < 0.5:
            model.layers[0].first.weight = model.middle[0].weight  # type: ignore[union-attr]
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}
