"""Models made without memory for their weights, or on a device of choice."""

from __future__ import annotations

import accelerate
import pytest
import torch
from torch import nn

from notebook_accel.training.big_modeling.empty_weights import init_empty_weights, init_on_device
from notebook_accel.training.big_modeling.tensors import named_module_tensors
from tests.training.big_modeling.models import Language


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("made", torch.zeros(3))
        self.register_parameter("none", None)


def devices(model: nn.Module) -> dict[str, str]:
    return {n: t.device.type for n, t in named_module_tensors(model, recurse=True)}


@pytest.mark.parametrize("include_buffers", [None, False, True])
def test_tensors_are_where_accelerate_leaves_them(include_buffers: bool | None) -> None:
    found = []
    for init in (init_empty_weights, accelerate.init_empty_weights):
        with init(include_buffers=include_buffers):
            model = Drawn()
        assert isinstance(model.linear.weight, nn.Parameter)
        found.append(devices(model))
    assert found[0] == found[1]
    assert found[0]["linear.weight"] == "meta"


def test_a_constructor_may_compute_with_small_tensors() -> None:
    """As drop path rates are computed; with Accelerate these are on the meta device too."""
    with init_empty_weights(include_buffers=True):
        assert [rate.item() for rate in torch.linspace(0, 1, 3)] == [0, 0.5, 1]


def test_the_environment_may_ask_for_buffers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights():
        assert devices(Drawn())["table"] == "meta"


def test_ties_frozen_weights_and_classes_of_parameters_are_kept() -> None:
    class Special(nn.Parameter):
        pass

    class Model(Language):
        def __init__(self) -> None:
            super().__init__()
            self.lmhead.bias.requires_grad_(False)
            self.own = Special(torch.ones(2))
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    with init_empty_weights():
        model = Model()
    assert model.lmhead.weight is model.embed.weight
    assert isinstance(model.own, Special)
    assert not model.frozen.requires_grad
    assert not model.lmhead.bias.requires_grad


def test_after_the_block_modules_are_made_as_before() -> None:
    with pytest.raises(KeyError), init_empty_weights(include_buffers=True):
        raise KeyError
    assert set(devices(Drawn()).values()) == {"cpu"}
    assert torch.zeros(1).device.type == "cpu"


def test_a_model_larger_than_memory_is_made_at_once() -> None:
    with init_empty_weights(include_buffers=True):
        model = nn.Linear(2**20, 2**20)
    assert model.weight.numel() == 2**40


@pytest.mark.parametrize("include_buffers", [None, False, True])
def test_tensors_are_made_where_accelerate_makes_them(include_buffers: bool | None) -> None:
    found = []
    for init in (init_on_device, accelerate.init_on_device):
        with init(torch.device("meta"), include_buffers=include_buffers):
            found.append(devices(Drawn()))
    assert found[0] == found[1]
    assert found[0]["linear.weight"] == "meta"


def test_a_device_may_be_named() -> None:
    with init_on_device(torch.device("meta")):
        assert nn.Linear(2, 2).weight.is_meta
    with init_on_device("cpu"):
        assert nn.Linear(2, 2).weight.device.type == "cpu"
