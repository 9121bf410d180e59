"""Models on host and disk give the outputs that they gave before, and can be put back."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import accelerate
import pytest
import torch
from torch import nn

from notebook_accel import Accelerator
from notebook_accel.errors import ConfigError
from notebook_accel.training.big_modeling import align_devices
from notebook_accel.training.big_modeling.align_devices import (
    AlignDevicesHook,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    has_offloaded_params,
)
from notebook_accel.training.big_modeling.dispatch import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
)
from notebook_accel.training.big_modeling.empty_weights import init_empty_weights
from notebook_accel.training.big_modeling.hooks import (
    add_hook_to_module,
    remove_hook_from_submodules,
)
from notebook_accel.training.big_modeling.loading import load_checkpoint_in_model
from notebook_accel.training.big_modeling.offload_store import offload_state_dict
from notebook_accel.training.big_modeling.tensors import named_module_tensors
from tests.training.big_modeling.models import Block, Language, values

if TYPE_CHECKING:
    from pathlib import Path

WORDS = torch.tensor([1, 2, 3])


def devices_of(model: nn.Module) -> dict[str, str]:
    return {name: str(t.device) for name, t in named_module_tensors(model, recurse=True)}


def hooks_of(model: nn.Module) -> dict[str, str]:
    """What each module's hooks do, without whose hooks they are."""
    return {
        name: repr(vars(module)["_hf_hook"]).split(" object at")[0].split(".")[-1]
        for name, module in model.named_modules()
        if "_hf_hook" in vars(module)
    }


@pytest.fixture
def model() -> Language:
    torch.manual_seed(0)
    return Language().eval()


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("preload", [None, ["Block"]])
def test_a_model_in_the_hosts_memory_or_on_disk_computes_as_before(
    model: Language, buffers: bool, preload: list[str] | None, tmp_path: Path
) -> None:
    expected, state = model(WORDS), values(model)
    kwargs: dict[str, Any] = {"offload_buffers": buffers, "preload_module_classes": preload}
    for offload in (cpu_offload, lambda m, **kw: disk_offload(m, tmp_path, **kw)):
        theirs = copy.deepcopy(model)
        assert offload(model, **kwargs) is model
        accelerate.cpu_offload(theirs, **kwargs)
        assert devices_of(model) == devices_of(theirs)
        assert hooks_of(model) == hooks_of(theirs)
        for _ in range(2):
            assert torch.equal(model(WORDS), expected)
        assert "meta" in set(devices_of(model).values())
        assert has_offloaded_params(model.embed)
        assert not has_offloaded_params(nn.Linear(1, 1))
        remove_hook_from_submodules(model)
        assert set(devices_of(model).values()) == {"cpu"}
        assert all(torch.equal(value, state[name]) for name, value in values(model).items())


def test_a_forward_gives_no_memory_back_to_the_driver(
    model: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time all that is queued on the device would be waited for, and memory be made again."""
    given_back: set[bool] = set()
    plain = align_devices.set_module_tensor_to_device

    def note(*args: Any, clear_cache: bool = True, **kwargs: Any) -> None:
        if args[2] == "meta":
            given_back.add(clear_cache)
        plain(*args, clear_cache=clear_cache, **kwargs)

    cpu_offload(model)
    monkeypatch.setattr(align_devices, "set_module_tensor_to_device", note)
    model(WORDS)
    assert given_back == {False}


MAPS = [
    {"embed": "cpu", "layers.0": "disk", "layers.1": "cpu", "lmhead": "cpu"},
    {"embed": "disk", "layers": "disk", "lmhead": "disk"},
    {"": "disk"},
    {"": "cpu"},
    {"embed": "cpu", "layers": "disk", "lmhead.weight": "disk", "lmhead.bias": "disk"},
]


@pytest.mark.filterwarnings("ignore:.*device_map keys:UserWarning")
@pytest.mark.parametrize("device_map", MAPS)
def test_a_dispatched_model_computes_as_before_with_the_hooks_of_accelerate(
    model: Language, device_map: dict[str, str], tmp_path: Path
) -> None:
    expected, theirs = model(WORDS), copy.deepcopy(model)
    dispatch_model(model, device_map, offload_dir=tmp_path / "ours")
    if device_map != {"": "disk"}:  # theirs writes nothing for it, and fails
        accelerate.dispatch_model(theirs, dict(device_map), offload_dir=tmp_path / "theirs")
        assert devices_of(model) == devices_of(theirs)
        assert hooks_of(model) == hooks_of(theirs)
    assert model.hf_device_map == device_map
    between = devices_of(model)
    for _ in range(2):
        assert torch.equal(model(WORDS), expected)
    assert devices_of(model) == between


class FourWeights(nn.Module):
    """Values of one size, which are read from files one after the other."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.register_parameter(name, nn.Parameter(torch.randn(4, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in (self.a, self.b, self.c, self.d):
            x = torch.tanh(x @ weight)
        return x


@pytest.mark.parametrize("is_empty", [False, True])
def test_values_from_files_are_told_apart_in_a_model_with_a_tied_weight(
    is_empty: bool, tmp_path: Path
) -> None:
    """They are copied, since the files are of another type, as they are on a GPU."""

    def make() -> Language:
        made = Language()
        made.layers = nn.Sequential(FourWeights())
        return made

    model = make()
    halves = {name: value.half() for name, value in model.state_dict().items()}
    offload_state_dict(tmp_path, halves)
    model.load_state_dict(halves)
    expected = model(WORDS)
    with init_empty_weights() if is_empty else nullcontext():
        model = make()
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    for _ in range(2):
        assert torch.equal(model(WORDS), expected)


def test_parts_elsewhere_compute_on_the_device_that_is_named(
    model: Language, tmp_path: Path
) -> None:
    theirs = copy.deepcopy(model)
    device_map: Any = {"embed": "meta", "layers": "cpu", "lmhead": "disk"}
    for dispatch, one in ((dispatch_model, model), (accelerate.dispatch_model, theirs)):
        dispatch(one, dict(device_map), main_device="meta", offload_dir=tmp_path / str(id(one)))
    assert hooks_of(model) == hooks_of(theirs)
    assert devices_of(model) == devices_of(theirs)
    assert "execution_device=meta, offload=True" in hooks_of(model)["layers.0.first"]


def test_a_model_cannot_be_moved_while_parts_of_it_are_elsewhere(
    model: Language, tmp_path: Path
) -> None:
    dispatch_model(model, {"embed": "cpu", "": "disk"}, offload_dir=tmp_path)
    for move in (lambda: model.to("cpu"), model.cuda, copy.deepcopy(model).cpu):
        with pytest.raises(RuntimeError, match="cannot be moved"):
            move()
    copied = copy.deepcopy(model)
    remove_hook_from_submodules(copied)
    assert copied.to(torch.float64).lmhead.weight.dtype == torch.float64
    assert dispatch_model(copied, {"": "cpu"}) is copied
    assert model.lmhead.weight.is_meta


def test_a_map_with_disk_needs_a_folder(model: Language) -> None:
    for dispatch, kind in ((dispatch_model, ConfigError), (accelerate.dispatch_model, ValueError)):
        with pytest.raises(kind, match="layers"):
            dispatch(model, {"": "cpu", "layers": "disk"})


def test_weights_on_disk_may_be_named_by_an_index(model: Language, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    expected, state = model(WORDS), model.layers.state_dict()
    file = str(tmp_path / "x.safetensors")
    save_file({name: value.contiguous() for name, value in state.items()}, file)
    index = {f"layers.{n}": {"safetensors_file": file, "weight_name": n} for n in state}
    dispatch_model(model, {"": "cpu", "layers": "disk"}, offload_index=index)
    assert torch.equal(model(WORDS), expected)


def test_hooks_can_be_forced_on_one_device(model: Language) -> None:
    expected = model(WORDS)
    dispatch_model(model, {"": "cpu"})
    assert hooks_of(model) == {}
    theirs = accelerate.dispatch_model(copy.deepcopy(model), {"": "cpu"}, force_hooks=True)
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert hooks_of(model) == hooks_of(theirs)
    assert torch.equal(model(WORDS), expected)


@pytest.mark.parametrize(
    "offload", [False, True, {"embed": True, "layers.0": False, "lmhead": True}]
)
def test_blocks_get_the_hooks_of_accelerate(model: Language, offload: Any) -> None:
    from accelerate.hooks import attach_align_device_hook_on_blocks as peer

    device: Any = torch.device("cpu")
    expected, theirs = model(WORDS), copy.deepcopy(model)
    weights = values(model)
    attach_align_device_hook_on_blocks(model, device, offload, weights_map=weights)
    peer(theirs, device, offload, weights_map=weights)
    assert hooks_of(model) == hooks_of(theirs)
    assert devices_of(model) == devices_of(theirs)
    assert torch.equal(model(WORDS), expected)


ATTACHED: dict[str, dict[str, Any]] = {
    "on one device": {"execution_device": "cpu"},
    "offloaded": {"execution_device": "cpu", "offload": True},
    "with buffers": {"execution_device": "cpu", "offload": True, "offload_buffers": True},
    "by whole blocks": {
        "execution_device": "cpu",
        "offload": True,
        "preload_module_classes": ["Block"],
        "skip_keys": "cache",
    },
}


@pytest.mark.parametrize("with_map", [False, True])
@pytest.mark.parametrize("name", ATTACHED)
def test_modules_get_the_hooks_of_accelerate(model: Language, name: str, with_map: bool) -> None:
    from accelerate.hooks import attach_align_device_hook as peer

    expected, theirs, settings = model(WORDS), copy.deepcopy(model), ATTACHED[name]
    for attach, one in ((attach_align_device_hook, model), (peer, theirs)):
        weights = {f"whole.{key}": value for key, value in values(one).items()}
        named = {"weights_map": weights, "module_name": "whole"} if with_map else {}
        attach(one, **settings, **named)  # type: ignore[operator]
    assert hooks_of(model) == hooks_of(theirs)
    assert devices_of(model) == devices_of(theirs)
    for _ in range(2):
        assert torch.equal(model(WORDS), expected)
    assert devices_of(model) == devices_of(theirs)
    remove_hook_from_submodules(model)
    assert set(devices_of(model).values()) == {"cpu"}


@pytest.mark.parametrize("preload", [None, ["Block"]])
def test_modules_are_put_on_a_device_by_the_hooks_of_accelerate(
    model: Language, preload: list[str] | None
) -> None:
    from accelerate.hooks import attach_execution_device_hook as peer

    theirs = copy.deepcopy(model)
    for attach, one in ((attach_execution_device_hook, model), (peer, theirs)):
        add_hook_to_module(one.lmhead, AlignDevicesHook("cpu"))  # it keeps its own
        attach(one, "meta", skip_keys=["cache"], preload_module_classes=preload)
    assert hooks_of(model) == hooks_of(theirs)
    assert devices_of(model) == devices_of(theirs)
    assert "skip_keys=['cache']" in hooks_of(model)["embed"]


def test_a_hook_may_act_for_the_modules_inside_and_puts_all_back() -> None:
    from accelerate import hooks as peer

    ours = SimpleNamespace(
        AlignDevicesHook=AlignDevicesHook,
        add_hook_to_module=add_hook_to_module,
        remove_hook_from_submodules=remove_hook_from_submodules,
    )
    inputs, seen = torch.randn(3, 4), []
    for library in (ours, peer):
        torch.manual_seed(0)
        block = Block().eval()
        expected = block(inputs)
        hook = library.AlignDevicesHook(
            "cpu", offload=True, place_submodules=True, io_same_device=True
        )
        library.add_hook_to_module(block, hook)
        found = block(inputs)
        assert torch.equal(found, expected)
        seen.append((devices_of(block), hook.original_devices, hook.input_device))
        library.remove_hook_from_submodules(block)
        assert set(devices_of(block).values()) == {"cpu"}
        assert torch.equal(block(inputs), expected)
    assert seen[0] == seen[1]
    assert seen[0][0]["first.weight"] == "meta"


def test_an_input_that_is_named_stays_where_it_is() -> None:
    class Keep(nn.Module):
        def forward(self, x: torch.Tensor, *, cache: torch.Tensor) -> tuple[str, str]:
            return str(x.device), str(cache.device)

    module = add_hook_to_module(Keep(), AlignDevicesHook("meta", skip_keys="cache"))
    assert module(torch.ones(1), cache=torch.ones(1)) == ("meta", "cpu")
    back = add_hook_to_module(nn.Identity(), AlignDevicesHook("meta", io_same_device=True))
    with pytest.raises(NotImplementedError):  # back from meta there is no way
        back(torch.ones(1))


def test_weights_can_be_looked_at_and_changed_in_place(model: Language) -> None:
    expected = model.lmhead.weight.detach().clone()
    cpu_offload(model)
    with align_module_device(model.lmhead, "cpu"):
        assert torch.equal(model.lmhead.weight, expected)
    assert model.lmhead.weight.device.type == "meta"
    plain = nn.Linear(2, 2)
    weight = plain.weight
    with align_module_device(plain, "cpu"):
        assert plain.weight is weight
    with align_module_device(plain):
        plain.weight.data.fill_(1)
    assert plain.weight is weight


def test_a_model_without_parameters_says_no_device() -> None:
    with pytest.raises(ConfigError, match=r"ReLU has no parameters.* pass execution_device="):
        cpu_offload(nn.ReLU())
    assert cpu_offload(nn.ReLU(), torch.device("cpu"))(torch.ones(1)) == 1


def test_an_offloaded_model_gives_its_whole_state(model: Language) -> None:
    state = values(model)
    cpu_offload(model)
    found = get_state_dict_offloaded_model(model)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert model.embed.weight.device.type == "meta"


def test_the_weights_of_an_offloaded_model_are_saved_from_where_they_are_kept(
    model: Language, tmp_path: Path
) -> None:
    accelerator, state = Accelerator(cpu=True), values(model)
    partly = {"embed": "cpu", "layers.0": "disk", "layers.1": "cpu", "lmhead": "cpu"}
    offloads: dict[str, Any] = {
        "host": cpu_offload,
        "disk": lambda one: disk_offload(one, tmp_path / "store"),
        "partly": lambda one: dispatch_model(one, partly, offload_dir=tmp_path / "part"),
    }
    for name, offload in offloads.items():
        offloaded = offload(copy.deepcopy(model))
        accelerator.save_model(offloaded, tmp_path / name, max_shard_size="200B")
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
        loaded = Language()
        load_checkpoint_in_model(loaded, tmp_path / name)
        found = loaded.state_dict()
        assert all(torch.equal(found[each], state[each]) for each in found), name
        assert set(map(str, devices_of(offloaded).values())) != {"cpu"}, "it stays offloaded"


def test_gradients_reach_what_comes_before_an_offloaded_block(model: Language) -> None:
    first = nn.Embedding(10, 4)
    cpu_offload(model.layers.train())
    model.layers(first(WORDS)).sum().backward()
    assert first.weight.grad is not None
