"""Quantised loading: what is refused everywhere, and real 8 and 4 bit layers with bitsandbytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.utils import BnbQuantizationConfig as PeerConfig
from torch import nn

from notebook_accel.errors import ConfigError
from notebook_accel.training import availability
from notebook_accel.training.big_modeling.empty_weights import init_empty_weights
from notebook_accel.training.big_modeling.quantized import (
    BnbQuantizationConfig,
    _quantize_weights,
    has_4bit_bnb_layers,
    load_and_quantize_model,
)
from tests.training.single import fresh_rank  # noqa: F401

if TYPE_CHECKING:
    from pathlib import Path

needs_bnb = pytest.mark.skipif(
    not availability.is_bnb_available(), reason="bitsandbytes is not installed"
)
GOOD: list[dict[str, Any]] = [
    {"load_in_8bit": True},
    {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bf16", "torch_dtype": "fp32"},
    {"load_in_4bit": True, "torch_dtype": torch.float32, "bnb_4bit_quant_type": "nf4"},
]
BAD: list[dict[str, Any]] = [
    {},
    {"load_in_8bit": True, "load_in_4bit": True},
    {"load_in_4bit": 1},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "x"},
    {"load_in_4bit": True, "bnb_4bit_compute_dtype": "x"},
    {"load_in_8bit": True, "torch_dtype": "x"},
    {"load_in_8bit": True, "skip_modules": "x"},
    {"load_in_8bit": True, "llm_int8_threshold": "x"},
]


@pytest.mark.parametrize("kwargs", GOOD)
def test_a_configuration_is_completed_as_accelerates(kwargs: dict[str, Any]) -> None:
    theirs = {k: v for k, v in vars(PeerConfig(**kwargs)).items() if k != "target_dtype"}
    assert vars(BnbQuantizationConfig(**kwargs)) == theirs


@pytest.mark.parametrize("kwargs", BAD)
def test_a_configuration_that_makes_no_sense_is_refused(kwargs: dict[str, Any]) -> None:
    for config in (BnbQuantizationConfig, PeerConfig):
        with pytest.raises(ValueError):
            config(**kwargs)


def test_modules_stay_in_float32_by_their_paths() -> None:
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(2), nn.LayerNorm(2)), nn.LayerNorm(2))
    config = BnbQuantizationConfig(load_in_8bit=True, keep_in_fp32_modules=["0.1", "bias"])
    _quantize_weights(model, model.state_dict(), config, {"": "cpu"})
    in_fp32 = {name for name, weight in model.named_parameters() if weight.dtype == torch.float32}
    assert in_fp32 == {"0.1.weight", "0.1.bias", "0.0.bias", "1.bias"}


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "is_bnb_available", lambda: False)
    with pytest.raises(ImportError, match="pip install bitsandbytes"):
        load_and_quantize_model(nn.Linear(1, 1), BnbQuantizationConfig(load_in_8bit=True))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 8))


def empty() -> nn.Sequential:
    with init_empty_weights():
        return make()


KINDS = [
    ({"load_in_8bit": True}, "Linear8bitLt", torch.int8),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "Linear4bit", torch.uint8),
]


@needs_bnb
@pytest.mark.parametrize(("kwargs", "layer", "dtype"), KINDS)
@pytest.mark.parametrize("from_file", [False, True])
def test_linear_layers_are_quantised_and_compute_nearly_the_same(
    kwargs: dict[str, Any], layer: str, dtype: torch.dtype, from_file: bool, tmp_path: Path
) -> None:
    config = BnbQuantizationConfig(**kwargs, torch_dtype="fp32", bnb_4bit_compute_dtype="fp32")
    model, x = make(), torch.randn(4, 64)
    expected = model(x)
    torch.save(model.state_dict(), tmp_path / "weights.bin")
    found = load_and_quantize_model(
        empty() if from_file else model,
        config,
        tmp_path / "weights.bin" if from_file else None,
    )
    assert [type(each).__name__ for each in found] == [layer, "LayerNorm", layer, "Linear"]
    assert found[0].weight.dtype == dtype
    assert found[1].weight.dtype == torch.float32
    assert has_4bit_bnb_layers(found) == (layer == "Linear4bit")
    relative = (found(x) - expected).norm() / expected.norm()
    assert 0 < relative < 0.2


@needs_bnb
def test_named_modules_stay_as_they_are_and_an_empty_model_needs_a_checkpoint() -> None:
    config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["0"], torch_dtype="fp32")
    found = load_and_quantize_model(make(), config)
    assert [type(each).__name__ for each in found][::3] == ["Linear", "Linear8bitLt"]
    with pytest.raises(ConfigError, match="weights_location"):
        load_and_quantize_model(empty(), config)
