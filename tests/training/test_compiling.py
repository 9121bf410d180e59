"""Compiling whole models and repeated blocks; the backend is "eager", so that nothing is built."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin as PeerPlugin
from accelerate.utils import compile_regions as peer_compile_regions
from torch import nn

from notebook_accel.errors import ConfigError
from notebook_accel.training.compiling import (
    DynamoBackend,
    TorchDynamoPlugin,
    compile_model,
    compile_regions,
    compile_regions_in_place,
    has_compiled_regions,
    is_compiled_module,
)
from notebook_accel.training.models import uncompiled


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
        self.head = nn.Sequential(nn.Linear(4, 2), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.body["layers"]:  # type: ignore[union-attr]
            x = torch.relu(layer(x))
        return self.head(x)


def compiled_parts(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_compiled_module(module)]


def test_blocks_are_compiled_as_accelerate_compiles_them() -> None:
    model, x = Layered(), torch.tensor([1, 2])
    compiled = compile_regions(model, backend="eager")
    assert compiled_parts(compiled) == compiled_parts(peer_compile_regions(model, backend="eager"))
    assert compiled_parts(model) == []
    assert type(compiled) is Layered
    assert compiled.embed._orig_mod is model.embed
    assert uncompiled(compiled) is model
    assert has_compiled_regions(compiled)
    assert not is_compiled_module(compiled)
    assert torch.equal(compiled(x), model(x))
    compiled(x).sum().backward()
    assert model.body["layers"][0].weight.grad is not None  # type: ignore[index]


def test_a_model_without_repeated_blocks_is_compiled_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert is_compiled_module(compile_regions(model, backend="eager"))


def test_blocks_can_be_compiled_where_they_are() -> None:
    model, x = Layered(), torch.tensor([1, 2])
    expected = model(x)
    assert compile_regions_in_place(model, backend="eager") is model
    assert torch.equal(model(x), expected)
    assert all(block._compiled_call_impl for block in model.body["layers"])  # type: ignore[union-attr]


def test_a_plugin_says_how() -> None:
    model = Layered()
    assert compile_model(model, TorchDynamoPlugin()) is model
    assert is_compiled_module(compile_model(model, TorchDynamoPlugin(backend="eager")))  # type: ignore[arg-type]
    regional = TorchDynamoPlugin(backend=DynamoBackend.EAGER, use_regional_compilation=True)
    compiled = compile_model(model, regional)
    assert not is_compiled_module(compiled)
    assert has_compiled_regions(compiled)
    with pytest.raises(ConfigError, match="inductor"):
        TorchDynamoPlugin(backend="fast")  # type: ignore[arg-type]


def test_a_plugin_reads_the_environment_as_accelerate_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchDynamoPlugin().to_dict() == PeerPlugin().to_dict()
    for name, value in {
        "BACKEND": "inductor",
        "MODE": "max-autotune",
        "USE_FULLGRAPH": "1",
        "USE_DYNAMIC": "true",
        "USE_REGIONAL_COMPILATION": "yes",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    assert TorchDynamoPlugin().to_dict() == PeerPlugin().to_dict()
    assert TorchDynamoPlugin().to_kwargs() == PeerPlugin().to_kwargs()
    assert [member.name for member in DynamoBackend] == [
        m.name for m in PeerPlugin().backend.__class__
    ]
