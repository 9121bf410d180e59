"""Weights that have several names: which they are, and how they become one again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from accelerate.utils import modeling as peer

from notebook_accel.training.big_modeling.tensors import set_module_tensor_to_device
from notebook_accel.training.ties import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
    tied_names,
)
from tests.training.big_modeling.models import Language

if TYPE_CHECKING:
    import pytest


def test_tied_weights_are_found_and_tied_again() -> None:
    model = Language()
    ties = find_tied_parameters(model)
    assert ties == peer.find_tied_parameters(model) == [["embed.weight", "lmhead.weight"]]
    for name in ties[0]:
        set_module_tensor_to_device(model, name, "meta")
    retie_parameters(model, ties)
    assert model.embed.weight is not model.lmhead.weight
    set_module_tensor_to_device(model, "lmhead.weight", "cpu", value=torch.ones(10, 4))
    retie_parameters(model, ties)
    assert model.embed.weight is model.lmhead.weight
    assert model.embed.weight.device.type == "cpu"


def test_the_names_of_a_tied_weight_are_in_the_order_of_the_model_where_that_counts() -> None:
    words, head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
    head.weight = words.weight
    model = torch.nn.Sequential(OrderedDict(words=words, head=head))
    assert tied_names(model) == [["words.weight", "head.weight"]]
    assert find_tied_parameters(model) == [["head.weight", "words.weight"]]
    assert find_tied_parameters(model) == peer.find_tied_parameters(model)


def test_tied_weights_on_two_devices_are_named(caplog: pytest.LogCaptureFixture) -> None:
    ties = find_tied_parameters(Language())
    check_tied_parameters_on_same_device(ties, {"embed": 0, "": 0})
    assert not caplog.records
    check_tied_parameters_on_same_device(ties, {"embed": 0, "lmhead": 1})
    assert "lmhead.weight" in caplog.text


def test_a_configuration_says_that_weights_are_tied() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    model = GPT2LMHeadModel(config)
    assert check_tied_parameters_in_config(model)
    assert peer.check_tied_parameters_in_config(model)
    assert not check_tied_parameters_in_config(Language())
