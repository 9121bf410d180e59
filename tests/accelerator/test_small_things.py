"""Smaller things in which an accelerator differs from the CPU."""

import os

import pytest
import torch

from notebook_accel import Accelerator, notebook_launcher
from notebook_accel.training.processes import devices

_KIND = str(torch.accelerator.current_accelerator())


def _states():
    """Whether the state of device 1 is given and restored while device 0 is the current one."""
    one = torch.device(_KIND, 1)
    torch.manual_seed(1)
    before = devices.get_rng_state(one)
    assert before is not None
    drawn = torch.rand(3, device=one).cpu()
    after = devices.get_rng_state(one)
    devices.set_rng_state(one, before)
    return [not torch.equal(before, after), torch.equal(torch.rand(3, device=one).cpu(), drawn)]


def test_random_states_are_those_of_the_device_asked_for():
    assert notebook_launcher(_states, num_processes=1, view="none")[0] == [True, True]


def _step_made_before():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    before = [weight.detach().cpu().clone() for weight in model.parameters()]
    accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
    optimizer.step()
    after = [weight.detach().cpu() for weight in model.parameters()]
    assert len(after) == 3, "tied weights stay tied"
    return all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_made_before_steps_the_weights_on_the_device(ranks, monkeypatch):
    monkeypatch.setenv("SIM_NEW_PARAMETERS", "1")
    assert all(notebook_launcher(_step_made_before, num_processes=ranks, view="none"))


def test_ranks_that_share_a_device_are_sent_to_gloo_only_where_it_serves_the_device():
    with pytest.raises(Exception, match="Start at most") as caught:
        devices.choose_device(cpu=False, local_rank=torch.accelerator.device_count())
    serves = _KIND in torch.distributed.Backend.backend_capability["gloo"]
    assert ("gloo" in str(caught.value)) is serves
    assert os.environ.get("RANK") is None
