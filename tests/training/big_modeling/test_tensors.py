"""One tensor of a module on a device: values, types and refusals."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import modeling as peer
from torch import nn

from notebook_accel.errors import ConfigError
from notebook_accel.training.big_modeling.tensors import (
    id_tensor_storage,
    named_module_tensors,
    set_module_tensor_to_device,
)
from tests.training.big_modeling.models import Language


def test_a_tensor_goes_to_the_meta_device_and_comes_back_with_a_value() -> None:
    model = Language(tied=False)
    was = model.embed.weight
    set_module_tensor_to_device(model, "embed.weight", "meta")
    assert model.embed.weight.device.type == "meta"
    assert isinstance(model.embed.weight, nn.Parameter)
    with pytest.raises(ConfigError, match="meta"):
        set_module_tensor_to_device(model, "embed.weight", "cpu")
    value = was.detach().half()
    set_module_tensor_to_device(model, "embed.weight", "cpu", value=value)
    assert model.embed.weight.dtype == torch.float32
    assert model.embed.weight.requires_grad
    assert torch.equal(model.embed.weight, value.float())


def test_types_are_cast_as_accelerate_casts_them() -> None:
    for value in (torch.ones(4), torch.ones(4, dtype=torch.int64), torch.ones(4).half()):
        for dtype in (None, torch.bfloat16):
            ours, theirs = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
            set_module_tensor_to_device(ours, "running_mean", "cpu", value=value, dtype=dtype)
            peer.set_module_tensor_to_device(theirs, "running_mean", "cpu", value, dtype)
            assert ours.running_mean is not None
            assert theirs.running_mean is not None
            assert ours.running_mean.dtype == theirs.running_mean.dtype


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("embed.weight", torch.ones(3, 3), ConfigError),
        ("embed.nothing", None, ConfigError),
        ("nothing.weight", None, AttributeError),
    ],
)
def test_what_does_not_fit_is_refused(
    name: str, value: torch.Tensor | None, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        set_module_tensor_to_device(Language(), name, "cpu", value=value)
    theirs = ValueError if kind is ConfigError else kind
    with pytest.raises(theirs):
        peer.set_module_tensor_to_device(Language(), name, "cpu", value=value)


def test_an_index_without_an_accelerator_is_refused() -> None:
    if not torch.accelerator.is_available():
        with pytest.raises(ConfigError, match="sees no accelerator"):
            set_module_tensor_to_device(Language(), "embed.weight", 0)


def test_tied_modules_share_one_copy_on_a_device() -> None:
    model = Language(tied=False)
    value = torch.ones(10, 4)
    tied: dict[int, dict[torch.device, torch.Tensor]] = {value.data_ptr(): {}}
    for name in ("embed.weight", "lmhead.weight"):
        set_module_tensor_to_device(model, name, "meta")
        set_module_tensor_to_device(model, name, "cpu", value, torch.bfloat16, tied_params_map=tied)
    assert model.embed.weight is model.lmhead.weight
    assert tied == {value.data_ptr(): {torch.device("cpu"): model.embed.weight}}


@pytest.mark.parametrize("recurse", [False, True])
@pytest.mark.parametrize("include_buffers", [False, True])
@pytest.mark.parametrize("remove", [False, True])
def test_tensors_are_listed_as_accelerate_lists_them(
    recurse: bool, include_buffers: bool, remove: bool
) -> None:
    args = (Language(), include_buffers, recurse, remove)
    assert [n for n, _ in named_module_tensors(*args)] == [
        n for n, _ in peer.named_module_tensors(*args)
    ]


def test_tensors_that_share_memory_have_one_id() -> None:
    whole = torch.arange(4)
    assert id_tensor_storage(whole) == id_tensor_storage(whole[1:])
    assert id_tensor_storage(whole) == peer.id_tensor_storage(whole)
    assert id_tensor_storage(whole) != id_tensor_storage(whole.clone())
    assert id_tensor_storage(torch.empty(3, device="meta"))[1] == 0
