"""Accelerate's functions for weights in parts: saved and loaded by hand."""

import accelerate
import accelerate.utils as peer
import pytest
import torch

from notebook_accel import Accelerator, utils
from tests.training.harness import run_ranks
from tests.training.meshes import FLOAT_ERROR, blocks, data, loss_of, make, weights_of

KINDS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


def save_and_load(folder):
    """Whatever is written is read back, and training goes on with it as it would have."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=blocks())
    plugin = accelerator.state.fsdp_plugin
    model, optimizer = accelerator.prepare(*make({}))

    def train():
        accelerator.forward_backward(model, *data(4).tensors, loss_of)
        optimizer.step()
        optimizer.zero_grad()
        return weights_of(accelerator, model)

    def spoil():
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
    accelerator.save_state(f"{folder}/not_safe", safe_serialization=False)
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
    utils.load_fsdp_model(plugin, accelerator, model, f"{folder}/not_safe")
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
    with pytest.raises(FileNotFoundError, match=r"pytorch_model_fsdp_3\.bin is not in"):
        utils.load_fsdp_model(plugin, accelerator, model, f"{folder}/whole", 3)


def are_close(one, other):
    """Up to the order in which an optimizer computes its step, which is not a checkpoint's."""
    pairs = [(torch.tensor(value), torch.tensor(other[name])) for name, value in one.items()]
    return all(torch.allclose(*pair, atol=FLOAT_ERROR) for pair in pairs)


def test_weights_in_parts_are_saved_and_loaded_by_hand(tmp_path):
    run_ranks(save_and_load, 2, str(tmp_path))
    for kind, names in zip(
        KINDS,
        ({"pytorch_model_fsdp_0", "optimizer_0"}, {"pytorch_model_fsdp.bin", "optimizer.bin"}),
        strict=True,
    ):
        assert {path.name for path in (tmp_path / kind / "a").iterdir()} == names


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
