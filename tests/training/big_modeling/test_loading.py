"""Checkpoints of every form, into models with and without weights, whole or spread."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import load_state_dict as peer_load_state_dict
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.training.big_modeling import loading
from notebook_accel.training.big_modeling.empty_weights import init_empty_weights
from notebook_accel.training.big_modeling.loading import (
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_state_dict,
)
from notebook_accel.training.checkpoint.weights import save_model
from tests.training.big_modeling.models import Language, values
from tests.training.harness import run_ranks

WORDS = torch.tensor([1, 2, 3])
FORMS = ["whole.safetensors", "pytorch_model.bin", "folder", "shards", "index"]


@pytest.fixture
def model() -> Language:
    torch.manual_seed(0)
    return Language().eval()


def write(model: nn.Module, form: str, folder: Path) -> Path:
    """A checkpoint of the model in one of FORMS."""
    if form.endswith(".bin"):
        torch.save(model.state_dict(), folder / form)
        return folder / form
    if form.endswith(".safetensors"):
        state = {name: v for name, v in model.state_dict().items() if name != "lmhead.weight"}
        save_file(state, folder / form)
        return folder / form
    save_model(model.state_dict(), folder, 200 if form != "folder" else "1GB", safe=True)
    return folder / "model.safetensors.index.json" if form == "index" else folder


def empty() -> Language:
    """A model that knows its own ties and has no weights."""
    with init_empty_weights():
        model = Language()
    assert model.lmhead.weight is model.embed.weight
    return model.eval()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [Language, empty])
def test_every_form_loads(model: Language, form: str, make: Any, tmp_path: Path) -> None:
    other = make().eval()
    load_checkpoint_in_model(other, write(model, form, tmp_path))
    assert all(torch.equal(v, values(other)[name]) for name, v in values(model).items())
    assert other.lmhead.weight is other.embed.weight
    assert torch.equal(other(WORDS), model(WORDS))


MAPS: list[Any] = [
    {"": "cpu"},
    {"embed": "cpu", "layers": "disk", "lmhead": "cpu"},
    {"embed": "disk", "layers.0": "disk", "layers.1": "cpu", "lmhead": "disk"},
    {"": "disk"},
    "auto",
    "sequential",
]


@pytest.mark.parametrize("form", ["whole.safetensors", "pytorch_model.bin", "shards"])
@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("through_files", [False, True])
def test_a_loaded_and_dispatched_model_computes_as_the_saved_one(
    model: Language, form: str, device_map: Any, through_files: bool, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").mkdir()
    checkpoint = write(model, form, tmp_path / "checkpoint")
    other = load_checkpoint_and_dispatch(
        empty(),
        checkpoint,
        device_map,
        offload_folder=tmp_path / "offload",
        offload_state_dict=through_files,
    )
    for _ in range(2):
        assert torch.equal(other(WORDS), model(WORDS))


@pytest.mark.parametrize("buffers", [False, True])
def test_buffers_may_be_put_on_disk_too(model: Language, buffers: bool, tmp_path: Path) -> None:
    checkpoint = write(model, "pytorch_model.bin", tmp_path)
    device_map = {"embed": "cpu", "layers": "disk", "lmhead": "cpu"}
    on_disk = []
    for load, name in (
        (load_checkpoint_and_dispatch, "ours"),
        (accelerate.load_checkpoint_and_dispatch, "theirs"),
    ):
        other = load(
            Language().eval(),
            str(checkpoint),
            device_map,
            offload_folder=str(tmp_path / name),
            offload_buffers=buffers,
        )
        assert torch.equal(other(WORDS), model(WORDS))
        means = {str(layer.norm.running_mean.device) for layer in other.layers}
        assert means == {"meta" if buffers else "cpu"}
        on_disk.append(set(json.loads((tmp_path / name / "index.json").read_text())))
    assert on_disk[0] == on_disk[1]


def load_into_parts(folder: str) -> list[Any]:
    """Whole weights into a model of which each rank has a part: all read, or rank 0 alone."""
    reads: list[int] = []
    found: list[Any] = []
    plain = loading._tensors

    def tensors(file: Path) -> Any:
        reads.append(dist.get_rank())
        return plain(file)

    loading._tensors = tensors
    for settings in ({}, {"full_state_dict": True, "broadcast_from_rank0": True}):
        reads.clear()
        torch.manual_seed(dist.get_rank())
        parts = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
        load_checkpoint_in_model(parts, folder, strict=True, **settings)
        whole = {name: value.full_tensor() for name, value in parts.state_dict().items()}
        found.append((whole, sorted(set(reads))))
    return found


def test_a_model_in_parts_is_loaded_by_all_ranks_or_by_rank_0(tmp_path: Path) -> None:
    torch.manual_seed(7)
    saved = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).state_dict()
    save_model(saved, tmp_path, "1GB", safe=True)
    for rank, found in enumerate(run_ranks(load_into_parts, 2, str(tmp_path))):
        for whole, _ in found:
            assert whole.keys() == saved.keys()
            assert all(torch.equal(whole[name], saved[name]) for name in saved)
        assert [reads for _, reads in found] == [[rank], [0] if rank == 0 else []]


def overwrite(file: Path) -> None:
    """As a save over it does: a tensor that is still a mapping of the file changes with it, and
    kills the process where the file gets shorter."""
    with file.open("r+b") as opened:
        opened.write(b"\0" * file.stat().st_size)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
@pytest.mark.parametrize("make", [Language, empty])
@pytest.mark.parametrize("form", ["pytorch_model.bin", "whole.safetensors"])
def test_a_file_may_be_replaced_once_it_is_loaded(
    model: Language, form: str, device_map: Any, make: Any, tmp_path: Path
) -> None:
    file, other = write(model, form, tmp_path), make().eval()
    load_checkpoint_in_model(other, file, device_map)
    state = load_state_dict(file, device_map)
    overwrite(file)
    assert torch.equal(other(WORDS), model(WORDS))
    assert all(torch.equal(value, values(model)[name]) for name, value in state.items())
    assert len(state) >= len(values(model)) - 1


def load_into_empty_parts(folder: str) -> bool:
    """Each rank has a part of the layer's weights, and the whole of the norm's averages."""
    file = Path(folder, f"{dist.get_rank()}.bin")
    torch.manual_seed(7)
    saved = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).state_dict()
    saved["1.running_mean"] += 3.0
    torch.save(saved, file)
    with torch.device("meta"):
        parts = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    load_checkpoint_in_model(parts, file)
    overwrite(file)
    found: dict[str, Any] = parts.state_dict()
    whole = {
        name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in found.items()
    }
    return all(torch.equal(value, saved[name]) for name, value in whole.items())


def test_so_it_may_where_each_rank_has_a_part(tmp_path: Path) -> None:
    assert run_ranks(load_into_empty_parts, 2, str(tmp_path)) == [True, True]


def test_limits_spread_a_model_over_host_and_disk(model: Language, tmp_path: Path) -> None:
    other = load_checkpoint_and_dispatch(
        empty(),
        write(model, "pytorch_model.bin", tmp_path),
        "auto",
        max_memory={"cpu": 900},
        no_split_module_classes=["Block"],
        offload_folder=tmp_path / "offload",
    )
    assert set(other.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(other(WORDS), model(WORDS))


def test_types_are_those_that_were_asked_for(model: Language, tmp_path: Path) -> None:
    checkpoint = write(model, "pytorch_model.bin", tmp_path)
    other = empty()
    load_checkpoint_in_model(
        other, checkpoint, {"": "cpu"}, dtype="float16", keep_in_fp32_modules=["norm"]
    )
    types = {name: value.dtype for name, value in other.state_dict().items()}
    assert types.pop("layers.0.norm.num_batches_tracked") == torch.int64
    assert types["layers.0.norm.weight"] == torch.float32
    assert types["layers.0.first.weight"] == types["embed.weight"] == torch.float16
    theirs = Language()
    accelerate.load_checkpoint_in_model(
        theirs, str(checkpoint), {"": "cpu"}, dtype="float16", keep_in_fp32_modules=["norm"]
    )
    assert types.items() <= {n: v.dtype for n, v in theirs.state_dict().items()}.items()


BAD = [
    ("nothing here", {}, "no checkpoint"),
    ("empty", {}, "0 files"),
    ("whole", {"device_map": {"": "disk"}}, "offload_folder"),
    ("whole", {"device_map": {"embed": "cpu"}}, "no device for"),
    ("other", {"strict": True}, "zzz"),
    ("other", {"strict": True, "device_map": {"": "cpu"}}, "zzz"),
    ("shape", {}, "shape"),
    ("shape", {"device_map": {"": "cpu"}}, "shape"),
]


@pytest.mark.parametrize(("which", "kwargs", "text"), BAD)
def test_what_does_not_fit_is_refused_as_accelerate_refuses_it(
    which: str, kwargs: dict[str, Any], text: str, tmp_path: Path
) -> None:
    state = Language().state_dict()
    torch.save(state, tmp_path / "whole")
    torch.save({**state, "zzz": torch.ones(1)}, tmp_path / "other")
    torch.save({**state, "embed.weight": torch.ones(2, 2)}, tmp_path / "shape")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=text):
        load_checkpoint_in_model(Language(), tmp_path / which, **kwargs)
    with pytest.raises((ValueError, RuntimeError)):
        accelerate.load_checkpoint_in_model(Language(), str(tmp_path / which), **kwargs)


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("x.safetensors", b"noise", "could not be read"),
        ("x.safetensors", (1 << 62).to_bytes(8, "little") + b"{}", "could not be read"),
        ("pytorch_model.bin", b"noise", "could not be read"),
        ("x.index.json", b"{", "could not be read"),
        ("x.index.json", b'{"weight_map": ["a"]}', "could not be read"),
        ("x.index.json", b'{"weight_map": {"a": 3}}', "could not be read"),
        ("x.index.json", b'{"weight_map": {"a": "b/../../c"}}', "lies outside of its folder"),
        ("x.index.json", b'{"weight_map": {"a": "/dev/zero"}}', "lies outside of its folder"),
        ("x.index.json", b'{"weight_map": {"a": "fifo.safetensors"}}', "is no regular file"),
        ("x.index.json", b'{"weight_map": {"a": "fifo.bin"}}', "is no regular file"),
    ],
)
def test_a_broken_or_forged_file_names_itself(
    name: str, data: bytes, told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    for fifo in ("fifo.bin", "fifo.safetensors"):
        os.mkfifo(tmp_path / fifo)  # which nobody opens for writing
    with pytest.raises(NotebookAccelError, match=told) as caught:
        load_checkpoint_in_model(Language(), tmp_path / name)
    assert str(tmp_path) in str(caught.value)


def test_a_file_from_before_torch_wrote_archives_loads(model: Language, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    other = empty()
    load_checkpoint_in_model(other, path)
    assert torch.equal(other(WORDS), model(WORDS))


def test_an_unknown_word_for_a_map_is_refused(tmp_path: Path) -> None:
    for load in (load_checkpoint_and_dispatch, accelerate.load_checkpoint_and_dispatch):
        with pytest.raises(ValueError, match="balanced_low_0"):
            load(Language(), tmp_path, device_map="evenly")


def test_weights_that_the_model_lacks_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({**Language().state_dict(), "zzz": torch.ones(1)}, tmp_path / "other")
    load_checkpoint_in_model(Language(), tmp_path / "other")
    assert "zzz" in caplog.text


def test_a_file_is_read_onto_the_devices_of_a_map(tmp_path: Path) -> None:
    save_file({"a.w": torch.ones(2), "b.w": torch.zeros(2)}, tmp_path / "x.safetensors")
    for device_map in (None, {"": "cpu"}, {"a": "cpu", "b": "disk"}):
        ours = load_state_dict(tmp_path / "x.safetensors", device_map)
        theirs = peer_load_state_dict(str(tmp_path / "x.safetensors"), device_map)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert load_state_dict(tmp_path / "x.safetensors", {"a": "meta", "b": "cpu"})["a.w"].is_meta


def test_the_offload_folder_is_in_the_format_of_accelerate(model: Language, tmp_path: Path) -> None:
    checkpoint = write(model, "pytorch_model.bin", tmp_path)
    device_map = {"embed": "cpu", "layers": "disk", "lmhead": "cpu"}
    for load, folder in (
        (load_checkpoint_in_model, tmp_path / "ours"),
        (accelerate.load_checkpoint_in_model, tmp_path / "theirs"),
    ):
        load(Language(), str(checkpoint), device_map, offload_folder=folder)
    ours, theirs = (
        json.loads((tmp_path / w / "index.json").read_text()) for w in ("ours", "theirs")
    )
    assert ours == theirs


def test_a_transformers_model_generates_from_host_and_disk(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2)
    saved = GPT2LMHeadModel(config).eval()
    saved.save_pretrained(tmp_path)
    with init_empty_weights():
        other = GPT2LMHeadModel(config)
    other = load_checkpoint_and_dispatch(
        other,
        tmp_path,
        device_map="auto",
        max_memory={"cpu": 35000},
        no_split_module_classes=["GPT2Block"],
        offload_folder=tmp_path / "offload",
    )
    assert set(other.hf_device_map.values()) == {"cpu", "disk"}
    words = torch.randint(0, 50, (1, 5))
    wanted = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(other.eval().generate(words, **wanted), saved.generate(words, **wanted))
