"""Hooks around a forward: what they see, how they join, and that they leave nothing behind."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

from notebook_accel import Accelerator
from notebook_accel.training.big_modeling.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from notebook_accel.training.big_modeling.layerwise_casting import (
    LayerwiseCastingHook,
    attach_layerwise_casting_hooks,
)
from notebook_accel.training.big_modeling.offload_on_call import (
    CpuOffload,
    UserCpuOffloadHook,
    cpu_offload_with_hook,
)


class AddOne(ModelHook):
    """Adds to inputs and outputs, and notes what it did."""

    def __init__(self, name: str = "", before: float = 0.0, after: float = 1.0) -> None:
        self.name, self.before, self.after = name, before, after
        self.calls: list[str] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.calls.append("init")
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.calls.append("pre")
        return (args[0] + self.before, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.calls.append("post")
        return output + self.after

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.calls.append("detach")
        return module


def test_a_hook_runs_around_the_forward_and_leaves_without_a_trace() -> None:
    module, x, hook = nn.Linear(2, 2), torch.randn(3, 2), AddOne(before=1)
    plain = module(x + 1)
    before = dict(vars(module))
    assert add_hook_to_module(module, hook) is module
    assert module._hf_hook is hook
    assert torch.equal(module(x), plain + 1)
    assert list(inspect.signature(module.forward).parameters) == ["input"]
    assert module.forward.__name__ == "forward"
    remove_hook_from_module(module)
    assert vars(module) == before
    assert hook.calls == ["init", "pre", "post", "detach"]


def test_hooks_are_replaced_or_joined_in_order() -> None:
    module, x = nn.Identity(), torch.zeros(1)
    add_hook_to_module(module, AddOne(after=10))
    add_hook_to_module(module, AddOne(after=1))
    assert module(x).item() == 1
    add_hook_to_module(module, AddOne(before=4, after=2), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert module(x).item() == 7
    add_hook_to_module(module, SequentialHook(AddOne(), AddOne()))
    assert module(x).item() == 2
    remove_hook_from_module(module)
    assert module(x).item() == 0


def test_a_hook_is_found_below_what_prepare_has_put_around_it() -> None:
    """Its forward is no longer the outermost: that is the one of the mixed precision."""
    x = torch.ones(1, 2)
    for count in (1, 2):
        hooks = [AddOne(after=5.0), AddOne(after=2.0)][:count]
        module = nn.Linear(2, 2)
        add_hook_to_module(module, hooks[0])
        Accelerator(cpu=True, mixed_precision="bf16").prepare(module)
        for hook in hooks[1:]:
            add_hook_to_module(module, hook, append=True)
        module(x)
        remove_hook_from_submodules(module)
        with torch.autocast("cpu", torch.bfloat16):
            plain = nn.functional.linear(x, module.weight, module.bias)
        assert torch.equal(module(x), plain.float())
        assert [hook.calls.count("pre") for hook in hooks] == [1] * count
        assert "_old_forward" not in vars(module)


def test_the_mixed_precision_is_taken_off_below_a_hook() -> None:
    accelerator, x = Accelerator(cpu=True, mixed_precision="bf16"), torch.randn(3, 2)
    module = accelerator.prepare(nn.Linear(2, 2))
    add_hook_to_module(module, AddOne())
    assert accelerator.unwrap_model(module, keep_fp32_wrapper=False) is module
    assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias) + 1)
    remove_hook_from_module(module)
    assert "forward" not in vars(module)


def test_a_hook_may_run_without_gradients() -> None:
    module, hook = nn.Linear(2, 2), ModelHook()
    hook.no_grad = True
    add_hook_to_module(module, hook)
    assert not module(torch.ones(2)).requires_grad


def test_hooks_of_modules_inside_are_removed_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_a_copied_and_a_pickled_module_have_hooks_of_their_own() -> None:
    module, x = nn.Linear(2, 2), torch.randn(1, 2)
    add_hook_to_module(module, AddOne(after=5))
    expected = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), expected)
        nn.init.zeros_(other.weight)
        nn.init.zeros_(other.bias)
        assert torch.equal(other(x), torch.full((1, 2), 5.0))
        remove_hook_from_module(other)
        assert torch.equal(other(x), torch.zeros(1, 2))
    assert torch.equal(module(x), expected)


def test_a_traced_module_can_be_hooked_and_changed_later() -> None:
    module = torch.fx.symbolic_trace(nn.Linear(2, 2))
    x = torch.randn(1, 2)
    add_hook_to_module(module, AddOne())
    module.recompile()
    plain = nn.functional.linear(x, module.weight, module.bias)
    assert torch.equal(module(x), plain + 1)
    remove_hook_from_module(module)
    assert torch.equal(module(x), plain)


def test_layers_are_stored_small_and_computed_large() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    small = copy.deepcopy(model)
    seen: list[torch.dtype] = []
    attach_layerwise_casting_hooks(small, torch.float8_e4m3fn, torch.float32)
    small[0].register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    assert [layer.weight.dtype for layer in small] == [
        torch.float8_e4m3fn,
        torch.float32,
        torch.float8_e4m3fn,
    ]
    x = torch.randn(3, 4)
    rounded = copy.deepcopy(model)
    for layer in (rounded[0], rounded[2]):
        layer.to(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(small(x), rounded(x))
    assert small[0].weight.dtype == torch.float8_e4m3fn
    assert isinstance(small[0]._hf_hook, LayerwiseCastingHook)


@pytest.mark.parametrize(
    ("kwargs", "small"),
    [
        ({}, {"0", "1.0", "1.1"}),
        ({"skip_modules_pattern": "0"}, {"1.1"}),
        ({"skip_modules_pattern": ("^0$",)}, {"1.0", "1.1"}),
        ({"skip_modules_classes": (nn.Conv1d,)}, {"0", "1.1"}),
    ],
)
def test_modules_can_be_left_out_of_the_casting(kwargs: dict[str, Any], small: set[str]) -> None:
    from accelerate.big_modeling import attach_layerwise_casting_hooks as peer

    for attach in (attach_layerwise_casting_hooks, peer):
        model = nn.Sequential(
            nn.Linear(2, 2), nn.Sequential(nn.Conv1d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1))
        )
        model.append(nn.Embedding(2, 2)).append(nn.LSTM(2, 2)).append(nn.Bilinear(2, 2, 2))
        attach(model, torch.float16, torch.float32, **kwargs)
        half = [name for name, weight in model.named_parameters() if weight.dtype == torch.half]
        assert {name.rpartition(".")[0] for name in half} == small


class Parcel:
    """An input that can be anywhere."""

    def __init__(self, moves: list[tuple[str, str]]) -> None:
        self.moves = moves

    def to(self, device: Any, **_: Any) -> Parcel:
        self.moves.append(("input", str(device)))
        return self


class Moved(nn.Module):
    """A model that notes where it is sent, and goes to a device that needs none: meta."""

    def __init__(self, name: str, moves: list[tuple[str, str]]) -> None:
        super().__init__()
        self.name, self.moves = name, moves
        self.weight = nn.Parameter(torch.ones(1))

    def to(self, device: Any) -> Moved:
        self.moves.append((self.name, str(device)))
        where = "cpu" if str(device) == "cpu" else "meta"
        self.weight = nn.Parameter(torch.ones(1, device=where))
        return self

    def forward(self, parcel: Parcel) -> Parcel:
        return parcel


def test_models_go_to_the_device_and_back_as_accelerates_do() -> None:
    seen = []
    for offload in (cpu_offload_with_hook, accelerate.cpu_offload_with_hook):
        moves: list[tuple[str, str]] = []
        first, one = offload(Moved("first", moves), "cuda:7")
        second, two = offload(Moved("second", moves), "cuda:7", prev_module_hook=one)
        for _ in range(2):
            second(first(Parcel(moves)))
        two.offload()
        two.remove()
        second(Parcel(moves))
        seen.append(moves)
    assert seen[0] == seen[1]
    assert ("first", "cuda:7") in seen[0]
    assert ("second", "cpu") in seen[0][2:]


def test_models_of_a_pipeline_send_each_other_to_the_host() -> None:
    first, one = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, two = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=one)
    assert isinstance(one, UserCpuOffloadHook)
    assert isinstance(one.hook, CpuOffload)
    assert one.model is first
    sent: list[str] = []
    one.offload = lambda: sent.append("first")  # type: ignore[method-assign]
    x = torch.randn(1, 2)
    assert torch.equal(second(first(x)), nn.Sequential(first, second)(x))
    assert sent == ["first"] * 2
    two.offload()
    two.remove()
    assert not hasattr(second, "_hf_hook")
    assert CpuOffload().execution_device == torch.device("cpu")
