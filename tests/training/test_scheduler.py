"""Prepared schedulers: how far they move, when not at all, and when they ran out."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import lr_scheduler

from notebook_accel import AcceleratedScheduler, Accelerator, GradientAccumulationPlugin
from notebook_accel.training.stepping.accumulation import Accumulation


def setup(make, rate=1.0, **settings):
    accelerator = Accelerator(cpu=True, **settings)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=rate)
    return (accelerator, *accelerator.prepare(optimizer, make(optimizer)))


def halving(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def on_ranks(make, num_steps):
    """A scheduler as the ranks of ``num_steps`` processes have it."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    accumulation = Accumulation(GradientAccumulationPlugin())
    scheduler = AcceleratedScheduler(
        make(optimizer), [], accumulation=accumulation, num_shares=num_steps
    )
    optimizer.step()
    return optimizer, scheduler, accumulation


def test_it_moves_with_real_steps_alone():
    accelerator, optimizer, scheduler = setup(halving, gradient_accumulation_steps=2)
    rates = []
    for _ in range(4):
        with accelerator.accumulate():
            optimizer.step()
            scheduler.step()
            rates.append(*scheduler.get_last_lr())
    assert rates == [1.0, 0.5, 0.5, 0.25]
    assert scheduler._step_count == 3, "batches between do not count"
    assert scheduler.__notebook_accel_unwrap__() is scheduler.scheduler


def test_its_state_is_asked_by_its_class():
    """As a subclass does, and torch's distributed checkpoints, which look for both methods."""
    _, _, scheduler = setup(halving)
    state = AcceleratedScheduler.state_dict(scheduler)
    AcceleratedScheduler.load_state_dict(scheduler, {**state, "last_epoch": 3})
    assert scheduler.scheduler.last_epoch == 3
    assert isinstance(scheduler, Stateful)


def test_a_length_that_counts_steps_of_the_optimizer_can_be_told():
    optimizer, scheduler, _ = on_ranks(halving, 4)
    assert not scheduler.split_batches
    scheduler.split_batches = True
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    scheduler.split_batches = False
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5**5


def chained(optimizer):
    return lr_scheduler.ChainedScheduler([halving(optimizer), halving(optimizer)])


def in_sequence(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5), halving(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])


@pytest.mark.parametrize("make", [chained, in_sequence])
def test_schedulers_made_of_others_move_too(make):
    accelerator, optimizer, scheduler = setup(make, gradient_accumulation_steps=2)
    for _ in range(4):
        with accelerator.accumulate():
            optimizer.step()
            scheduler.step()
    expected = setup(make)
    for _ in range(2):
        expected[1].step()
        expected[2].step()
    assert scheduler.get_last_lr() == expected[2].get_last_lr() != [1.0]


def test_it_can_move_on_its_own():
    accelerator, _, scheduler = setup(
        halving, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
    )
    with pytest.warns(UserWarning, match="before `optimizer.step"), accelerator.accumulate():
        scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_it_follows_the_wrapped_optimizer_too():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    first, second = (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0) for _ in range(2))
    first, second = accelerator.prepare(first, second)
    scheduler = accelerator.prepare(halving(second))
    assert scheduler.optimizers == [second]
    assert accelerator.prepare(scheduler) is scheduler
    second._overflow = True
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0], "a skipped step is none"
    second._overflow = False
    first._overflow = True
    second.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5], "another optimizer's step is not this one's"


def test_a_metric_counts_once_whatever_the_ranks_and_windows():
    optimizer, scheduler, accumulation = on_ranks(
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1), 4
    )
    accumulation.sync_gradients = False  # an open window after the epoch's loop
    rates = []
    for _ in range(4):
        scheduler.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 0.5, 0.5]


def test_one_cycle_ends_where_it_ends():
    _, scheduler, _ = on_ranks(
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=7), 2
    )
    for _ in range(6):
        scheduler.step()
    assert scheduler.last_epoch == 7


def linear(length):
    return lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step, 1) * max(0.0, 1 - step / length)
    )


def test_training_on_after_the_rate_reached_0_is_told_once():
    optimizer, scheduler, _ = on_ranks(linear(6), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # the length was right: 3 steps of 2 ranks
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
        scheduler.step()
    # Python warns of files that other tests left open as it collects them: of another category.
    (one,) = (one for one in caught if issubclass(one.category, UserWarning))
    assert "with len() of the loader before prepare()" in str(one.message)


def test_warm_restarts_and_a_single_process_are_not_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, scheduler, _ = on_ranks(
            lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: (step % 4 != 0) * 1.0),
            2,
        )
        for _ in range(8):
            scheduler.step()
        _, scheduler, _ = on_ranks(linear(3), 1)
        for _ in range(8):
            scheduler.step()
