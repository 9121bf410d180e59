"""Mixed precision: settings, the forward under autocast and back, loss scaling on the CPU."""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, AutocastKwargs, ConfigError, GradScalerKwargs


class Outputs(NamedTuple):
    logits: torch.Tensor
    ids: torch.Tensor


class Net(nn.Module):
    """Shows the type in which it computed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.computed_in = None

    def forward(self, inputs, *, nested=False):
        logits = self.layer(inputs)
        self.computed_in = logits.dtype
        outputs = Outputs(logits, torch.arange(3))
        return {"a": [outputs]} if nested else logits

    def helper(self):
        return "still here"


INPUTS = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("argument", "ours", "theirs", "expected"),
    [
        (None, None, None, "no"),
        (None, None, "bf16", "bf16"),
        (None, "fp16", "bf16", "fp16"),
        (None, "FP16", None, "fp16"),
        ("no", "fp16", "bf16", "no"),
        ("bf16", None, "fp16", "bf16"),
    ],
)
def test_the_first_setting_wins(argument, ours, theirs, expected, monkeypatch):
    settings = {"NOTEBOOK_ACCEL_MIXED_PRECISION": ours, "ACCELERATE_MIXED_PRECISION": theirs}
    for name, value in settings.items():
        monkeypatch.setenv(name, value or "")
    accelerator = Accelerator(cpu=True, mixed_precision=argument)
    assert accelerator.mixed_precision == expected
    assert (accelerator.scaler is not None) == (expected == "fp16")


def test_an_unknown_precision_is_refused_by_name(monkeypatch):
    expected = "mixed_precision='fp7': expected one of 'no', 'bf16', 'fp16', 'fp8'"
    with pytest.raises(ConfigError, match=expected):
        Accelerator(cpu=True, mixed_precision="fp7")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "half")
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION='half': expected one of"):
        Accelerator(cpu=True)
    monkeypatch.setenv("NOTEBOOK_ACCEL_MIXED_PRECISION", "full")
    with pytest.raises(ValueError, match="NOTEBOOK_ACCEL_MIXED_PRECISION='full': expected one of"):
        Accelerator(cpu=True)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_prepared_model_computes_in_half_and_gives_float32(name, dtype):
    accelerator = Accelerator(cpu=True, mixed_precision=name)
    net = Net()
    plain = net.forward
    model = accelerator.prepare(net)
    assert model(INPUTS).dtype == torch.float32
    assert net.computed_in == dtype
    nested = model(INPUTS, nested=True)["a"][0]
    assert type(nested) is Outputs
    assert (nested.logits.dtype, nested.ids.dtype) == (torch.float32, torch.int64)
    assert net.layer.weight.dtype == torch.float32
    assert (type(model), model.helper()) == (Net, "still here")
    with accelerator.autocast():
        assert (INPUTS @ INPUTS.T).dtype == dtype
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (INPUTS @ INPUTS.T).dtype == torch.float32
    assert accelerator.unwrap_model(model) is net
    assert net(INPUTS) is not None
    assert net.computed_in == dtype, "kept unless asked otherwise"
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is net
    assert "forward" not in vars(net)
    assert net.forward == plain


def test_a_second_accelerator_s_precision_replaces_the_first_s():
    net = Net()
    Accelerator(cpu=True, mixed_precision="bf16").prepare(net)
    Accelerator(cpu=True, mixed_precision="fp16").prepare(net)(INPUTS)
    assert net.computed_in == torch.float16
    Accelerator(cpu=True).prepare(net)
    assert "forward" not in vars(net)


def test_a_forward_that_the_user_had_set_comes_back():
    net = Net()
    net.forward = lambda inputs: inputs @ net.layer.weight.T
    own = net.forward
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.prepare(net)(INPUTS).dtype == torch.float32
    accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    assert net.forward is own


def test_copies_and_pickles_of_a_prepared_model_stand_on_their_own():
    net = Accelerator(cpu=True, mixed_precision="bf16").prepare(Net())
    average = copy.deepcopy(net)
    with torch.no_grad():
        for weight in average.parameters():
            weight.zero_()
    assert average(INPUTS).abs().sum() == 0
    assert net(INPUTS).abs().sum() > 0
    assert average.computed_in == torch.bfloat16
    sent = pickle.loads(pickle.dumps(net))
    sent(INPUTS)
    assert sent.computed_in == torch.float32
    assert torch.equal(sent.layer.weight, net.layer.weight)


def test_autocast_options_hold():
    options = [AutocastKwargs(enabled=False)]
    net = Net()
    Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=options).prepare(net)(INPUTS)
    assert net.computed_in == torch.float32


def two_optimizers(scale):
    options = [GradScalerKwargs(init_scale=scale, growth_interval=1)]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=options)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.5) for part in net)
    return (accelerator, *accelerator.prepare(net, first, second))


def test_two_optimizers_of_one_backward_divide_by_the_same_scale():
    torch.manual_seed(0)
    accelerator, net, first, second = two_optimizers(16.0)
    twin = copy.deepcopy(net)
    steps = torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(3):  # the scale grows at every step
        accelerator.backward(net(INPUTS).sum())
        twin(INPUTS).sum().backward()
        for optimizer in (first, second, steps):
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 128.0
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-9, atol=1e-3)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    accelerator, net, first, second = two_optimizers(2.0**40)
    before = copy.deepcopy(net.state_dict())
    accelerator.backward(net(INPUTS).sum())
    first.step()
    second.step()
    assert accelerator.optimizer_step_was_skipped
    assert first.step_was_skipped
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 2.0**39
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_clipping_unscales_once_and_only_the_optimizers_of_these_weights():
    accelerator, net, first, second = two_optimizers(256.0)
    accelerator.backward(net(INPUTS).sum())
    scaled = net[1].weight.grad.clone()
    norm = accelerator.clip_grad_norm_(net[0].parameters(), 0.01)
    assert accelerator.clip_grad_norm_(net[0].parameters(), 1.0) <= 0.0101
    assert norm < 100, "not the norm of scaled gradients"
    assert torch.equal(net[1].weight.grad, scaled), "the other optimizer's wait for its step"
    first.step()
    second.step()
    accelerator.unscale_gradients()
    accelerator.unscale_gradients(first)
    assert not accelerator.optimizer_step_was_skipped


def test_values_are_clipped_at_the_end_of_a_window_and_without_the_scale():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    net = nn.Linear(4, 1, bias=False)
    before = copy.deepcopy(net.weight)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    for _ in range(2):
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.ones(1, 4)).sum())
            accelerator.clip_grad_value_(net.parameters(), 0.75)
            optimizer.step()
    # Each batch has a gradient of 0.5.
    torch.testing.assert_close(before - net.weight, torch.full((1, 4), 0.75))


def test_an_optimizer_without_gradients_steps_as_without_scaling():
    accelerator, net, first, second = two_optimizers(16.0)
    accelerator.backward(net[1](net[0](INPUTS).detach()).sum())
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    first.step()
    second.step()
    assert not first.step_was_skipped


def test_a_scaler_that_is_switched_off_scales_nothing():
    options = [GradScalerKwargs(enabled=False)]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=options)
    assert accelerator.scaler is None
