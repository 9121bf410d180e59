"""Accelerate's functions for weights in parts: saved, loaded and spread by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import accelerate
import accelerate.utils as peer
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor

from notebook_accel import Accelerator, ConfigError, utils
from tests.training.harness import run_ranks
from tests.training.meshes import FLOAT_ERROR, Tiny, blocks, data, loss_of, make, weights_of
from tests.training.single import fresh_rank  # noqa: F401

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


def save_and_load(folder: str) -> None:
    """Whatever is written is read back, and training goes on with it as it would have."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=blocks())
    plugin: Any = accelerator.state.fsdp_plugin
    model, optimizer = accelerator.prepare(*make({}))

    def train() -> dict[str, Any]:
        accelerator.forward_backward(model, *data(4).tensors, loss_of)
        optimizer.step()
        optimizer.zero_grad()
        return weights_of(accelerator, model)

    def spoil() -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        optimizer.optimizer.state.clear()

    before = train()
    accelerate.PartialState(cpu=True)  # for its logger
    theirs = peer.FullyShardedDataParallelPlugin(fsdp_version=2)
    peer.save_fsdp_model(theirs, accelerator, model, f"{folder}/theirs")
    for kind in KINDS:
        plugin.set_state_dict_type(kind)
        for _ in range(2):  # over what is there
            utils.save_fsdp_model(plugin, accelerator, model, f"{folder}/{kind}/a")
        utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, f"{folder}/{kind}/a")
        utils.save_fsdp_model(plugin, accelerator, model, f"{folder}/{kind}/b", 1, use_dcp=False)
    accelerator.save_state(f"{folder}/whole")
    after = train()
    for kind in KINDS:
        plugin.set_state_dict_type(kind)
        spoil()
        utils.load_fsdp_model(plugin, accelerator, model, f"{folder}/{kind}/b", 1, use_dcp=False)
        assert weights_of(accelerator, model) == before
        spoil()
        place = f"{folder}/{kind}/a"
        parts = f"{place}/pytorch_model_fsdp_0" if kind == KINDS[0] else place
        utils.load_fsdp_model(plugin, accelerator, model, parts)
        utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, place)
        assert are_close(train(), after)
    spoil()
    utils.load_fsdp_model(plugin, accelerator, model, f"{folder}/whole")
    assert weights_of(accelerator, model) == before
    spoil()
    plugin.set_state_dict_type(KINDS[0])
    utils.load_fsdp_model(plugin, accelerator, model, f"{folder}/theirs")
    assert weights_of(accelerator, model) == before
    spoil()
    theirs.set_state_dict_type("FULL_STATE_DICT")
    peer.load_fsdp_model(theirs, accelerator, model, f"{folder}/FULL_STATE_DICT/a")
    assert weights_of(accelerator, model) == before
    plugin.set_state_dict_type("FULL_STATE_DICT")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model_fsdp_3\.bin is not there"):
        utils.load_fsdp_model(plugin, accelerator, model, f"{folder}/whole", 3)


def are_close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Up to the order in which an optimizer computes its step, which is not a checkpoint's."""
    pairs = [(torch.tensor(value), torch.tensor(other[name])) for name, value in one.items()]
    return all(torch.allclose(*pair, atol=FLOAT_ERROR) for pair in pairs)


def spread_by_hand() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=blocks())
    torch.manual_seed(3)
    model = Tiny()
    old = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model(data(4).tensors[0]), data(4).tensors[1]).backward()
    optimizer.step()
    momentum = {name: optimizer.state[weight]["momentum_buffer"] for name, weight in old.items()}
    assert utils.fsdp2_prepare_model(accelerator, model) is model
    new = dict(model.named_parameters())
    assert all(isinstance(weight, DTensor) for weight in new.values())
    assert not accelerator._prepared.models
    mapping = {old[name].data_ptr: weight for name, weight in new.items()}
    utils.fsdp2_switch_optimizer_parameters(optimizer, mapping)
    stepped = [weight for group in optimizer.param_groups for weight in group["params"]]
    assert all(one is other for one, other in zip(stepped, new.values(), strict=True))
    for name, weight in new.items():
        assert torch.equal(optimizer.state[weight]["momentum_buffer"].full_tensor(), momentum[name])
    with pytest.raises(KeyError, match=r"no new weight for one of shape \(12, 8\)"):
        utils.fsdp2_switch_optimizer_parameters(optimizer, {})

    torch.manual_seed(4)
    whole = Tiny().state_dict()
    given = whole if accelerator.is_main_process else {}
    assert utils.fsdp2_load_full_state_dict(accelerator, model, given) is model
    loaded = accelerator.get_state_dict(model)
    assert all(torch.equal(loaded[name], value) for name, value in whole.items())
    given.pop("blocks.0.up.weight", None)
    with pytest.raises(RuntimeError, match=r"up\.weight"):
        utils.fsdp2_load_full_state_dict(accelerator, model, given)

    ours, theirs = Tiny(), Tiny()
    assert utils.fsdp2_apply_ac(accelerator, ours) is ours
    accelerator.state.fsdp_plugin.set_auto_wrap_policy(theirs)  # type: ignore[union-attr]
    peer.fsdp2_apply_ac(accelerator, theirs)
    assert [name for name, part in ours.named_modules() if "forward" in vars(part)] == [
        name for name, part in theirs.named_modules() if isinstance(part, CheckpointWrapper)
    ]
    plain = Accelerator(cpu=True)
    for refused in (utils.fsdp2_apply_ac, utils.fsdp2_prepare_model):
        with pytest.raises(ConfigError, match=r"fsdp2_\w+\(\) takes its settings from the FSDP"):
            refused(plain, Tiny())


def all_by_hand(folder: str) -> None:
    save_and_load(folder)
    spread_by_hand()


def test_weights_in_parts_are_saved_and_spread_by_hand(tmp_path: Path) -> None:
    run_ranks(all_by_hand, 2, str(tmp_path))
    for kind, names in zip(
        KINDS,
        (
            {"pytorch_model_fsdp_0", "optimizer_0"},
            {"pytorch_model_fsdp.bin", "optimizer.bin"},
        ),
        strict=True,
    ):
        assert {path.name for path in (tmp_path / kind / "a").iterdir()} == names


class Adapted(torch.nn.Linear):
    """Looks like a model of PEFT: its weight is frozen, its bias trains."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.weight.requires_grad_(False)


def test_of_an_adapted_model_what_trains_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from notebook_accel.training import fsdp_functions

    monkeypatch.setattr(fsdp_functions, "is_peft_model", lambda model: isinstance(model, Adapted))
    accelerator = Accelerator(cpu=True)
    model, other = Adapted(), Adapted()
    for kind in KINDS:
        plugin = utils.FullyShardedDataParallelPlugin(state_dict_type=kind)
        folder = tmp_path / kind
        utils.save_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
        with pytest.raises(RuntimeError, match="weight"):
            utils.load_fsdp_model(plugin, accelerator, other, folder)
        utils.load_fsdp_model(plugin, accelerator, other, folder, adapter_only=True)
        assert torch.equal(other.bias, model.bias)
        assert not torch.equal(other.weight, model.weight)
