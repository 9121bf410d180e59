"""Which strategy is taken, and what every strategy promises beside its own tests."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, gather_object
from tests.training.harness import on_ranks, run_ranks


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, left, right):
        return self.layer(left + right)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_forward_backward_is_its_three_steps_and_takes_several_inputs(precision):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    model = accelerator.prepare(TwoInputs())
    left, right, targets = torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 1)
    loss = nn.functional.mse_loss(model(left, right), targets)
    accelerator.backward(loss)
    expected = model.layer.weight.grad
    for inputs in ((left, right), {"left": left, "right": right}):
        model.zero_grad()
        again = accelerator.forward_backward(model, inputs, targets, nn.functional.mse_loss)
        assert not again.requires_grad
        assert again == loss
        assert torch.equal(model.layer.weight.grad, expected)


def test_a_model_given_twice_is_prepared_once():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    one, other = accelerator.prepare(model, model)
    assert one is other


def thaw_and_freeze(sharded=False):
    """The first layer is frozen, trains from the middle of an epoch to that of the next one."""
    torch.manual_seed(1)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules="0")
    settings = {"fsdp_plugin": plugin} if sharded else {}
    accelerator = Accelerator(
        cpu=True, split_batches=True, gradient_accumulation_steps=2, **settings
    )
    first, calls = nn.Linear(2, 3).requires_grad_(False), []
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(row, row.sum(0, keepdim=True)) for row in torch.randn(16, 2)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    model.register_forward_hook(lambda *_: calls.append(1))
    for epoch in range(3):
        for number, (inputs, targets) in enumerate(loader):
            if number == 2:
                first.requires_grad_(epoch == 1)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    whole = accelerator.get_state_dict(model)
    return [weight.flatten().tolist() for weight in whole.values()], len(calls)


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_may_be_thawed_and_frozen_after_prepare(sharded):
    """As in gradual unfreezing; DDP itself exchanges what trained as it was made, for ever, and
    what FSDP ignores is averaged by us."""
    alone, num_calls = thaw_and_freeze()
    for weights, calls in run_ranks(thaw_and_freeze, 2, sharded):
        assert calls == num_calls, "the user's hooks stay"
        for ours, expected in zip(weights, alone, strict=True):
            assert ours == pytest.approx(expected, abs=1e-6)


@on_ranks(2)
def test_a_model_of_which_nothing_trained_as_it_was_prepared_is_told():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1).requires_grad_(False))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(torch.ones(1, 2))
        model.requires_grad_(True)
        model(torch.ones(1, 2))
    about = [one for one in told if "exchange its gradients" in str(one.message)]
    assert len(about) == accelerator.is_main_process


@pytest.mark.parametrize(
    "way", ["thawed", "by its wrapper", "frozen", "none before", "grown", "resized"]
)
@on_ranks(2)
def test_weights_that_train_since_a_second_prepare_are_exchanged(way):
    """Each way to change which weights train, a second ``prepare``, and a step."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner[0].requires_grad_(way == "frozen")
    inner[1].requires_grad_(way != "none before")
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    before, optimizer = accelerator.prepare(inner, optimizer)
    inner.requires_grad_(True)
    if way == "frozen":
        inner[0].requires_grad_(False)
    elif way == "resized":  # as Transformers does it, after a backward
        accelerator.backward(before(torch.ones(1, 2)).sum())
        optimizer.zero_grad()
        inner[1].weight.data, inner[1].bias.data = torch.ones(3, 2), torch.ones(3)
    elif way == "grown":
        inner.append(nn.Linear(2, 1))
        optimizer.add_param_group({"params": list(inner[2].parameters())})
    model = accelerator.prepare(before if way == "by its wrapper" else inner)
    for _ in range(2):
        inputs = torch.full((1, 2), 1.0 + accelerator.process_index)
        accelerator.backward(model(inputs).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    one, other = gather_object([[weight.tolist() for weight in inner.parameters()]])
    assert one == other
