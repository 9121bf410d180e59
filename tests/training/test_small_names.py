"""Small functions under Accelerate's names do what they do there."""

import inspect
import warnings
from typing import Any

import accelerate
import accelerate.utils as peer
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import notebook_accel
from notebook_accel import utils
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from tests.training.single import forget_states


@pytest.mark.parametrize(
    "name", ["DDPCommunicationHookType", "DynamoBackend", "LoggerType", "PrecisionType", "RNGType"]
)
def test_texts_are_asked_for_as_in_accelerate(name):
    ours, theirs = getattr(utils, name), getattr(peer, name)
    assert ours.list() == theirs.list()
    for text in ("fp16", "cuda", "wandb", "EAGER", "nothing", ours.list()[0]):
        assert (text in ours) == (text in theirs), text
    assert all(member in ours for member in ours)
    assert 3 not in ours


def test_what_deepspeed_needs():
    weight = nn.Parameter(torch.ones(2))
    with utils.GatheredParameters(weight, 0), utils.GatheredParameters([weight], enabled=False):
        assert weight.numel() == 2


def test_classes_are_made_by_hand_as_there():
    from notebook_accel.data_loader import DataLoaderStateMixin, get_sampler
    from notebook_accel.state import is_initialized

    assert not is_initialized()
    notebook_accel.GradientState(notebook_accel.GradientAccumulationPlugin(num_steps=2))
    assert notebook_accel.GradientState().num_steps == 2
    nothing_said = None
    assert notebook_accel.GradientAccumulationPlugin(nothing_said).num_steps == 1
    plain = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    optimizer = AcceleratedOptimizer(plain, True, torch.amp.GradScaler("cpu", init_scale=4.0))
    half = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 0.5**step)
    scheduler = AcceleratedScheduler(half, optimizer, split_batches=True)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch asks for get_last_lr() instead
        assert scheduler.get_lr() == half.get_lr()
    accelerator = notebook_accel.Accelerator(cpu=True)
    assert is_initialized()
    loader = DataLoader(range(4), batch_size=2)
    assert isinstance(get_sampler(loader), SequentialSampler)
    whole = DataLoader(
        range(4), sampler=BatchSampler(SequentialSampler(range(4)), 2, False), batch_size=None
    )
    assert isinstance(get_sampler(whole), SequentialSampler)
    assert isinstance(accelerator.prepare(loader), DataLoaderStateMixin)


def test_loaders_are_made_by_accelerates_arguments():
    seen = []
    for module in (notebook_accel.data_loader, accelerate.data_loader):
        plain = (False, False, False)  # no torchdata, no dropping, no copies in the background
        shard = module.DataLoaderShard(range(7), None, None, None, 1, *plain, None, 2, batch_size=2)
        # Divided batches, the first one left out, by no function and over no mesh, in epoch 2.
        settings = (True, 1, *plain, None, None, 2)
        dispatcher = module.DataLoaderDispatcher(range(7), *settings, batch_size=2)
        for loader in (shard, dispatcher):
            begin = loader.iteration
            ends = [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
            seen.append((begin, ends, loader.iteration))
        generator = torch.Generator()
        loader = module.DataLoaderShard(range(2), synchronized_generator=generator)
        assert loader.synchronized_generator is generator
    assert seen[:2] == seen[2:]


def test_a_state_without_an_accelerator_has_no_plugins():
    library: Any
    for library in (notebook_accel, accelerate):
        for name in ("fsdp_plugin", "deepspeed_plugin", "parallelism_config", "dynamo_plugin"):
            with pytest.raises(ValueError, match=r"Accelerator\("):
                library.state.AcceleratorState(cpu=True, **{name: object()})
            forget_states(library)


def test_the_door_of_the_accelerator_has_the_classes_that_are_imported_there():
    ours, theirs = notebook_accel.accelerator, vars(accelerate.accelerator)
    classes = {name for name, value in theirs.items() if inspect.isclass(value)}
    wanted = {name for name in classes if theirs[name].__module__.startswith("accelerate.")}
    assert {"GradientAccumulationPlugin", "DataLoaderConfiguration"} <= wanted
    assert {name for name in wanted if not hasattr(ours, name)} == set()
    assert ours.DistributedType is notebook_accel.DistributedType
