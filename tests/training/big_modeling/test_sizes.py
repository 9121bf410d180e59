"""What models weigh: the figures are Accelerate's, for any model."""

from __future__ import annotations

import random

import pytest
import torch
from accelerate.utils import modeling as peer
from accelerate.utils.other import convert_bytes as peer_convert_bytes
from torch import nn

from notebook_accel.errors import ConfigError
from notebook_accel.training.big_modeling.dtypes import CustomDtype, dtype_byte_size
from notebook_accel.training.big_modeling.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_bytes,
    convert_file_size_to_int,
    direct_parts,
    get_max_layer_size,
    get_module_leaves,
)
from tests.training.big_modeling.models import Language, random_model


@pytest.mark.parametrize("seed", range(20))
def test_sizes_are_those_of_accelerate(seed: int) -> None:
    model = random_model(random.Random(seed))
    special = {"embed.weight": torch.float32}
    for kwargs in ({}, {"dtype": torch.float16}, {"dtype": "float16", "special_dtypes": special}):
        for buffers_only in (False, True):
            assert compute_module_sizes(model, **kwargs, buffers_only=buffers_only) == dict(
                peer.compute_module_sizes(model, **kwargs, buffers_only=buffers_only)
            )
        assert compute_module_total_buffer_size(model, **kwargs) == (
            peer.compute_module_total_buffer_size(model, **kwargs)
        )
    sizes = compute_module_sizes(model)
    assert calculate_maximum_sizes(model) == peer.calculate_maximum_sizes(model)
    for no_split in ([], ["Block"], ["Sequential"]):
        assert get_max_layer_size(direct_parts(model), sizes, no_split) == (
            peer.get_max_layer_size(direct_parts(model), sizes, no_split)
        )
    assert get_module_leaves(sizes) == peer.get_module_leaves(sizes)


def test_whole_numbers_keep_their_type_and_meta_weighs_what_it_would() -> None:
    model = nn.BatchNorm1d(4)
    half = compute_module_sizes(model, dtype=torch.float16)
    assert half["num_batches_tracked"] == 8
    assert half["weight"] == 8
    assert compute_module_sizes(model.to("meta"), dtype=torch.float16) == half


def test_a_model_names_what_must_not_be_split() -> None:
    model = Language()
    model._no_split_modules = ["Block"]
    assert calculate_maximum_sizes(model) == peer.calculate_maximum_sizes(model)
    assert calculate_maximum_sizes(model)[1][1] == ["layers.0", "layers.1"]


TYPES = [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64, torch.uint16]
TYPES += [torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_of_a_type(dtype: torch.dtype) -> None:
    assert dtype_byte_size(dtype) == peer.dtype_byte_size(dtype)


def test_packed_types_weigh_parts_of_a_byte() -> None:
    assert dtype_byte_size(CustomDtype.INT4) == 0.5
    assert dtype_byte_size(CustomDtype.INT2) == 0.25
    assert dtype_byte_size(CustomDtype.FP8) == 1
    assert dtype_byte_size(torch.uint4) == 0.5
    assert compute_module_sizes(nn.Linear(4, 4), dtype=CustomDtype.INT4)[""] == 10


@pytest.mark.parametrize(
    "text", ["10MB", "1KiB", "3GIB", "1Gib", "1.5GB", "10mb", "1Kb", "5 GB", 5]
)
def test_a_size_is_read_as_accelerate_reads_it(text: str | int) -> None:
    assert convert_file_size_to_int(text) == peer.convert_file_size_to_int(text)


@pytest.mark.parametrize("text", ["abc", "-1GB", "5", "8bit"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="unit"):
        convert_file_size_to_int(text)
    with pytest.raises(ValueError):
        peer.convert_file_size_to_int(text)


@pytest.mark.parametrize("size", [0, 10, 1024, 10**10, 5e20])
def test_bytes_are_shown_as_accelerate_shows_them(size: float) -> None:
    assert convert_bytes(size) == peer_convert_bytes(size)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="float61"):
        compute_module_sizes(nn.Linear(1, 1), dtype="float61")
