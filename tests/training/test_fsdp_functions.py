"""Accelerate's functions for weights in parts: saved and loaded by hand."""

import os

import accelerate
import accelerate.utils as peer
import pytest
import torch

from notebook_accel import Accelerator, utils
from tests.training import meshes
from tests.training.harness import on_ranks

KINDS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


def are_close(one, other):
    """Up to the order in which an optimizer computes its step, which is not a checkpoint's."""
    pairs = [(torch.tensor(value), torch.tensor(other[name])) for name, value in one.items()]
    return all(torch.allclose(*pair, atol=meshes.FLOAT_ERROR) for pair in pairs)


@on_ranks(2)
def test_weights_in_parts_are_saved_and_loaded_by_hand(tmp_path):
    """Whatever is written is read back, and training goes on with it as it would have."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=meshes.blocks())
    plugin = accelerator.state.fsdp_plugin
    model, optimizer = accelerator.prepare(*meshes.make({}))

    def train():
        inputs, targets = meshes.data(4).tensors
        accelerator.forward_backward(model, inputs, targets, meshes.loss_of)
        optimizer.step()
        optimizer.zero_grad()
        return meshes.weights_of(accelerator, model)

    def check_model(load, plugin, place, *args, **options):
        spoil()
        load(plugin, accelerator, model, f"{tmp_path}/{place}", *args, **options)
        assert meshes.weights_of(accelerator, model) == before

    def spoil():
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        optimizer.optimizer.state.clear()

    before = train()
    accelerate.PartialState(cpu=True)  # for its logger
    theirs = peer.FullyShardedDataParallelPlugin(fsdp_version=2)
    peer.save_fsdp_model(theirs, accelerator, model, f"{tmp_path}/theirs")
    for kind in KINDS:
        plugin.set_state_dict_type(kind)
        for _ in range(2):  # over what is there
            utils.save_fsdp_model(plugin, accelerator, model, f"{tmp_path}/{kind}/a")
        utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, f"{tmp_path}/{kind}/a")
        utils.save_fsdp_model(plugin, accelerator, model, f"{tmp_path}/{kind}/b", 1, use_dcp=False)
    accelerator.save_state(f"{tmp_path}/whole")
    accelerator.save_state(f"{tmp_path}/not_safe", safe_serialization=False)
    after = train()
    for kind in KINDS:
        plugin.set_state_dict_type(kind)
        check_model(utils.load_fsdp_model, plugin, f"{kind}/b", 1, use_dcp=False)
        parts = "/pytorch_model_fsdp_0" if kind == KINDS[0] else ""
        check_model(utils.load_fsdp_model, plugin, f"{kind}/a{parts}")
        place = f"{tmp_path}/{kind}/a"
        utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, place)
        assert are_close(train(), after)
    for place in ("whole", "not_safe"):
        check_model(utils.load_fsdp_model, plugin, place)
    theirs.set_state_dict_type("FULL_STATE_DICT")
    check_model(peer.load_fsdp_model, theirs, "FULL_STATE_DICT/a")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model_fsdp_3\.bin is not in"):
        utils.load_fsdp_model(plugin, accelerator, model, f"{tmp_path}/whole", 3)
    plugin.set_state_dict_type(KINDS[0])
    check_model(utils.load_fsdp_model, plugin, "theirs")
    in_parts, whole = (set(os.listdir(tmp_path / kind / "a")) for kind in KINDS)
    assert in_parts == {"pytorch_model_fsdp_0", "optimizer_0"}
    assert whole == {"pytorch_model_fsdp.bin", "optimizer.bin"}


class Adapted(torch.nn.Linear):
    """Looks like a model of PEFT: its weight is frozen, its bias trains."""

    def __init__(self):
        super().__init__(2, 2)
        self.weight.requires_grad_(False)


def test_of_an_adapted_model_what_trains_is_written(tmp_path, monkeypatch):
    from notebook_accel.training import fsdp_functions

    monkeypatch.setattr(fsdp_functions, "_is_of_peft", lambda model: isinstance(model, Adapted))
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
