"""Weights in files: what is written comes back, in the format of Accelerate both ways."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from accelerate.utils import offload as peer
from safetensors.torch import save_file

from notebook_accel.errors import ConfigError
from notebook_accel.training.big_modeling.offload_store import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)

if TYPE_CHECKING:
    from pathlib import Path

STATE = {
    "a.weight": torch.randn(2, 3),
    "scalar": torch.tensor(2.5),
    "half": torch.randn(4).bfloat16(),
    "whole": torch.arange(3),
    "flag": torch.tensor([True, False]),
    "column": torch.randn(4, 3).t(),
}
STATE["column"] = torch.randn(4, 3).t()


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def test_what_is_written_comes_back_with_every_type(tmp_path: Path) -> None:
    state = {**STATE, "none": torch.zeros(0, 2), "eighth": torch.ones(4).to(torch.float8_e4m3fn)}
    offload_state_dict(tmp_path / "new", state)
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "new")
    assert list(loader) == list(state)
    assert len(loader) == len(state)
    assert loader.all_keys == list(state)
    for name, value in state.items():
        assert loader[name].dtype == value.dtype
        assert same(loader[name].float(), value.float())


def test_accelerate_reads_what_we_write_and_we_read_what_it_writes(tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "ours", STATE)
    theirs = peer.OffloadedWeightsLoader(save_folder=tmp_path / "ours")
    peer.offload_state_dict(tmp_path / "theirs", STATE)
    ours = OffloadedWeightsLoader(save_folder=tmp_path / "theirs")
    for name, value in STATE.items():
        assert same(theirs[name], value)
        assert same(ours[name], value)
    index = [json.loads((tmp_path / who / "index.json").read_text()) for who in ("ours", "theirs")]
    assert index[0] == index[1]


def test_a_loaded_weight_may_be_changed_and_the_file_stays(tmp_path: Path) -> None:
    index = offload_weight(STATE["a.weight"], "w", tmp_path)
    for _ in range(2):
        loaded = load_offloaded_weight(tmp_path / "w.dat", index["w"])
        assert same(loaded, STATE["a.weight"])
        loaded.zero_()


def test_a_weight_written_again_leaves_readers_of_the_old_one_alone(tmp_path: Path) -> None:
    index = offload_weight(torch.ones(4), "w", tmp_path)
    old = load_offloaded_weight(tmp_path / "w.dat", index["w"])
    offload_weight(torch.zeros(4), "w", tmp_path)
    assert torch.equal(old, torch.ones(4))


def test_an_index_grows(tmp_path: Path) -> None:
    save_offload_index({}, tmp_path)
    assert not (tmp_path / "index.json").exists()
    save_offload_index({"a": {"dtype": "float32", "shape": [1]}}, tmp_path)
    save_offload_index({"b": {"dtype": "float32", "shape": [2]}}, tmp_path)
    assert set(json.loads((tmp_path / "index.json").read_text())) == {"a", "b"}


def test_a_loader_joins_a_state_dict_files_and_safetensors(tmp_path: Path) -> None:
    save_file({"inside": torch.ones(3)}, tmp_path / "x.safetensors")
    file = str(tmp_path / "x.safetensors")
    index = {"c": {"safetensors_file": file, "weight_name": "inside", "dtype": "float16"}}
    index["b"] = offload_weight(torch.zeros(2), "b", tmp_path)["b"]
    loader = OffloadedWeightsLoader({"a": torch.ones(1)}, tmp_path, index)
    assert list(loader) == ["a", "c", "b"]
    assert same(loader["c"], torch.ones(3).half())
    loader.device = torch.device("cpu")  # as main_device of dispatch_model may be
    assert same(loader["c"], torch.ones(3).half())
    assert same(loader["b"], torch.zeros(2))
    with pytest.raises(KeyError):
        loader["d"]
    with pytest.raises(ConfigError, match="nothing to load"):
        OffloadedWeightsLoader()
    leads_out = OffloadedWeightsLoader(save_folder=tmp_path / "in", index={"../b": index["b"]})
    for act in (lambda: offload_weight(torch.ones(1), "../e", tmp_path), lambda: leads_out["../b"]):
        with pytest.raises(ConfigError, match=r"'\.\./.' cannot have a file in .*without folders"):
            act()
    assert not (tmp_path.parent / "e.dat").exists()


def test_prefixes_and_parts_are_those_of_accelerate() -> None:
    data = {"a.b": 1, "a.c": 2, "ab.c": 3, "a": 4}
    ours, theirs = PrefixedDataset(data, "a."), peer.PrefixedDataset(data, "a.")
    assert list(ours) == list(theirs) == ["a.b", "a.c"]
    assert ours["b"] == theirs["b"] == 1
    assert len(ours) == len(theirs)
    state = {name: torch.tensor(value) for name, value in data.items()}
    assert extract_submodules_state_dict(state, ["a"]) == (
        peer.extract_submodules_state_dict(state, ["a"])
    )
