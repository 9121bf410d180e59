"""Device maps: for any model and any limits they are those of Accelerate."""

from __future__ import annotations

import logging
import random
import warnings
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import modeling as peer
from torch import nn

from notebook_accel.errors import ConfigError
from notebook_accel.training.big_modeling.device_map import check_device_map, clean_device_map
from notebook_accel.training.big_modeling.inference import infer_auto_device_map
from notebook_accel.training.big_modeling.memory_limits import get_balanced_memory, get_max_memory
from notebook_accel.training.big_modeling.sizes import compute_module_sizes
from tests.training.big_modeling.models import Language, random_model

DEVICES: list[list[int | str]] = [
    [0, "cpu"],
    [0, 1],
    [0, 1, "cpu", "disk"],
    ["cpu", "disk"],
    [0, 1, 2],
    ["cpu"],
    ["mps", "cpu"],
    [1, "cpu"],
]
BLOCKS = [None, ["Block"], ["Linear"], ["Block", "Sequential"]]


@pytest.mark.parametrize("seed", range(100))
def test_maps_and_balanced_limits_are_those_of_accelerate(seed: int) -> None:
    chance = random.Random(seed)
    model = random_model(chance)
    total = compute_module_sizes(model)[""]
    limits = {key: chance.randint(0, int(total * 1.2)) for key in chance.choice(DEVICES)}
    spread: dict[str, Any] = {
        "no_split_module_classes": chance.choice(BLOCKS),
        "dtype": chance.choice([None, torch.float16]),
    }
    kwargs = {**spread, "offload_buffers": True, "clean_result": chance.random() < 0.7}
    theirs = accelerate.infer_auto_device_map(model, dict(limits), **kwargs)
    assert infer_auto_device_map(model, limits, **kwargs) == dict(theirs)
    for low_zero in (False, True) if "disk" not in limits else ():
        balanced = peer.get_balanced_memory(model, dict(limits), low_zero=low_zero, **spread)
        assert get_balanced_memory(model, limits, low_zero=low_zero, **spread) == balanced


@pytest.mark.parametrize("seed", range(10))
def test_weights_of_another_type_count_as_they_are(seed: int) -> None:
    chance = random.Random(seed)
    model = random_model(chance)
    total = compute_module_sizes(model)[""]
    limits: dict[int | str, int | str] = {0: total // 3, 1: total // 3, "cpu": total}
    types = {"embed.weight": torch.float32, "layers.0.first.weight": torch.float64}
    kwargs: dict[str, Any] = {"dtype": torch.float16, "special_dtypes": types}
    theirs = accelerate.infer_auto_device_map(model, dict(limits), offload_buffers=True, **kwargs)
    found = infer_auto_device_map(model, limits, offload_buffers=True, **kwargs)
    assert found == dict(theirs)
    balanced = peer.get_balanced_memory(model, dict(limits), **kwargs)
    assert get_balanced_memory(model, limits, **kwargs) == balanced


@pytest.mark.parametrize("seed", range(30))
def test_fallback_allocation_is_that_of_accelerate(seed: int) -> None:
    chance = random.Random(seed)
    model = random_model(chance)
    model.lmhead.weight = nn.Parameter(model.lmhead.weight.detach())  # untied: theirs crashes
    model.layers[0].first = nn.Linear(3, 3)  # type: ignore[operator,index,union-attr]
    total = compute_module_sizes(model)[""]
    limits = {key: chance.randint(0, total // 2) for key in chance.choice(DEVICES)}
    kwargs: dict[str, Any] = {"offload_buffers": True, "fallback_allocation": True}
    kwargs["no_split_module_classes"] = chance.choice(BLOCKS)
    theirs = accelerate.infer_auto_device_map(model, dict(limits), **kwargs)
    assert infer_auto_device_map(model, limits, **kwargs) == dict(theirs)


def test_names_that_are_part_of_others_do_not_confuse_ties() -> None:
    """Accelerate takes "b" for a part of "emb" and fails."""
    model = Language()
    model.register_buffer("d", torch.zeros(2))
    assert infer_auto_device_map(model, {"cpu": 10**6}) == {"": "cpu"}


def test_direct_buffers_of_a_split_module_are_in_the_map() -> None:
    """Accelerate leaves them out, and then refuses its own map."""
    model = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    model[0].register_buffer("extra", torch.zeros(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = infer_auto_device_map(model, {0: 165, "cpu": 10**6})
        assert found == {"0.0": 0, "0.1": "cpu", "0.2": "cpu", "0.extra": "cpu"}
        check_device_map(model, found)
        theirs = accelerate.infer_auto_device_map(model, {0: 165, "cpu": 10**6})
        with pytest.raises(ValueError, match="extra"):
            peer.check_device_map(model, theirs)


def test_what_fits_nowhere_goes_to_disk_and_limits_may_be_texts() -> None:
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(3)))  # 40,400 bytes each
    found = infer_auto_device_map(model, {"cpu": "81KB"})
    assert found == {"0": "cpu", "1": "disk", "2": "disk"}, "room is kept for those on disk"
    assert infer_auto_device_map(model, {"cpu": "1KB"}) == {"": "disk"}


def test_a_device_that_stays_empty_is_named_with_what_it_would_need(
    caplog: pytest.LogCaptureFixture,
) -> None:
    infer_auto_device_map(nn.Sequential(nn.Linear(4, 4)), {0: 10, "cpu": 1000})
    assert "nothing fits on [0]" in caplog.text
    assert "0: 80 bytes" in caplog.text


def test_buffers_of_offloaded_modules_need_room_on_the_device_that_computes() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(100, affine=False) for _ in range(3)))
    with pytest.warns(UserWarning, match="offload_buffers=True"):
        infer_auto_device_map(model, {0: 1700, "cpu": 10**6})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(model, {0: 1700, "cpu": 10**6}, offload_buffers=True)


def test_verbose_says_what_it_decides(caplog: pytest.LogCaptureFixture) -> None:
    infer_auto_device_map(Language(), {0: 400, "cpu": 10**6}, verbose=True)
    texts = [record.getMessage() for record in caplog.records]
    assert "embed goes to 0" in texts
    assert "layers.1 goes to cpu" in texts


def test_limits_are_checked_and_sorted(caplog: pytest.LogCaptureFixture) -> None:
    given: dict[int | str, int | str] = {"disk": "1GB", "cpu": 7, 1: 5, 0: "1KB"}
    assert list(get_max_memory(given).items()) == [(0, 1000), (1, 5), ("cpu", 7), ("disk", 10**9)]
    assert "accelerator 1" in caplog.text
    with pytest.raises(ConfigError, match="'foo'"):
        get_max_memory({"foo": 5})
    with pytest.raises(ValueError):
        peer.get_max_memory({"foo": 5})


def test_the_limits_of_this_machine_are_what_is_free() -> None:
    free, theirs = get_max_memory(), peer.get_max_memory()
    assert list(free) == list(theirs)
    for device, size in free.items():
        assert 0.5 < size / theirs[device] < 2


@pytest.mark.parametrize(
    "device_map",
    [
        {"a.b": 0, "a.c": 0, "d": 1},
        {"a": 0, "b": 0},
        {"a.b.c": "cpu", "a.b.d": "cpu", "a.e": 0},
        {"a.b": 0},
        {"ab.c": 0, "ab.d": 0, "a.c": 1},
    ],
)
def test_maps_are_cleaned_as_accelerate_cleans_them(device_map: dict[str, Any]) -> None:
    theirs = peer.clean_device_map(dict(device_map))
    assert clean_device_map(dict(device_map)) == theirs


@pytest.mark.parametrize("device_map", [{"embed": 0}, {"embed": 0, "layers": 0}])
def test_a_map_that_leaves_out_weights_is_refused(device_map: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"lmhead\.bias"):
        check_device_map(Language(), device_map)
    with pytest.raises(ValueError, match=r"lmhead\.bias"):
        peer.check_device_map(Language(), device_map)


def test_a_map_that_names_what_is_no_module_is_doubted() -> None:
    with pytest.warns(UserWarning, match="nothing"):
        check_device_map(Language(), {"": 0, "nothing": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_device_map(Language(), {"": 0})


@pytest.fixture(autouse=True)
def quiet_peer() -> None:
    logging.getLogger("accelerate").setLevel(logging.CRITICAL)
