"""The Accelerator as its users meet it: arguments, prepare, reports, and many ranks at once."""

import copy
import gc
import json
import multiprocessing
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from notebook_accel import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    Accelerator,
    AutocastKwargs,
    ConfigError,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    notebook_launcher,
)
from notebook_accel.training.collectives import gather_object
from tests.training.harness import on_ranks, warnings_about
from tests.training.loading import SizedStream
from tests.training.meshes import Tiny
from tests.training.single import Told, be
from tests.waiting import eventually


def parts():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return DataLoader(range(4)), model, optimizer, schedule


# ---- arguments


def test_old_loader_arguments_are_honoured():
    config = DataLoaderConfiguration(even_batches=False, data_seed=3)
    accelerator = Accelerator(
        cpu=True, dataloader_config=config, split_batches=True, use_seedable_sampler=True
    )
    assert accelerator.dataloader_config == DataLoaderConfiguration(
        split_batches=True, even_batches=False, use_seedable_sampler=True, data_seed=3
    )
    assert config.split_batches is False, "the user's own stays as it was"
    assert (accelerator.split_batches, accelerator.even_batches) == (True, False)
    assert (accelerator.dispatch_batches, accelerator.non_blocking) == (None, False)
    assert accelerator.use_seedable_sampler
    accelerator.even_batches = True
    assert accelerator.dataloader_config.even_batches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fsdp_plugin": object()}, "is a object: expected a FullyShardedDataParallelPlugin"),
        ({"parallelism_config": 2}, "is a int: expected a ParallelismConfig"),
        ({"megatron_lm_plugin": object()}, r"^Accelerator\(megatron_lm_plugin=\.\.\.\): Megatron"),
        ({"dynamo_backend": "fast"}, r"backend='fast'\): expected one of no, eager"),
        ({"deepspeed_plugins": {"a": object()}}, "is a object: expected a DeepSpeedPlugin"),
        ({"gradient_accumulation_steps": 0}, "steps=0: expected a whole number, 1 or more"),
        ({"gradient_accumulation_steps": "2"}, "steps='2': expected a whole number, 1"),
        (
            {
                "gradient_accumulation_steps": 2,
                "gradient_accumulation_plugin": GradientAccumulationPlugin(),
            },
            "pass one of them",
        ),
        ({"kwargs_handlers": [AutocastKwargs()] * 2}, "two AutocastKwargs"),
        ({"kwargs_handlers": [object()]}, "has a object: expected objects of AORecipeKwargs, "),
        ({"kwargs_handlers": AutocastKwargs()}, "is a AutocastKwargs: expected a list, such as"),
        ({"dataloader_config": {}}, "is a dict: expected a DataLoaderConfiguration, or None"),
        ({"project_config": "runs"}, "is a str: expected a ProjectConfiguration, or None"),
        (
            {"gradient_accumulation_plugin": {"num_steps": 2}},
            "is a dict: expected a GradientAccumulationPlugin, or None",
        ),
        ({"rng_types": "torch"}, "rng_types='torch': expected a list of names"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Accelerator(cpu=True, **arguments)


def test_it_says_that_it_stays_in_its_process():
    with pytest.raises(ConfigError, match="Make one in the process that needs it"):
        pickle.dumps(Accelerator(cpu=True))


def test_asking_for_nothing_is_no_mistake_but_a_wrong_name_is():
    Accelerator(cpu=True, fsdp_plugin=None, dynamo_backend="no", log_with=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mixed_precison'"):
        Accelerator(cpu=True, mixed_precison="bf16")


def test_accumulation_of_the_code_beats_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "5")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 5
    with pytest.warns(UserWarning, match="steps=2 of the code is used, not the environment's 5"):
        assert Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accelerator(cpu=True, gradient_accumulation_steps=5)
    monkeypatch.setenv("NOTEBOOK_ACCEL_GRADIENT_ACCUMULATION_STEPS", "many")
    with pytest.raises(ConfigError, match="NOTEBOOK_ACCEL_GRADIENT_ACCUMULATION_STEPS='many'"):
        Accelerator(cpu=True)


@pytest.mark.parametrize("limit", [0, "3"])
def test_how_many_checkpoints_are_kept_is_a_number(limit):
    with pytest.raises(ConfigError, match=f"limit={limit!r}: expected a whole number, 1 or"):
        ProjectConfiguration(total_limit=limit)


def test_a_project_s_folder_may_be_given_twice(tmp_path):
    config = ProjectConfiguration(total_limit=3)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, project_config=config)
    assert accelerator.project_configuration is config
    assert (accelerator.project_dir, accelerator.logging_dir) == (str(tmp_path), str(tmp_path))


# ---- prepare


def test_prepare_takes_any_order_and_gives_it_back():
    loader, model, optimizer, schedule = parts()
    given = (schedule, "text", loader, optimizer, None, model)
    accelerator = Accelerator(cpu=True)
    ready = accelerator.prepare(*given)
    assert [type(item) for item in ready[:2]] == [AcceleratedScheduler, str]
    assert isinstance(ready[2], DataLoader)
    assert ready[2] is not loader
    assert isinstance(ready[3], AcceleratedOptimizer)
    assert ready[4] is None
    assert ready[5] is model
    assert ready[0].optimizers == [ready[3]]
    again = accelerator.prepare(*ready)
    assert all(one is other for one, other in zip(again, ready, strict=True))
    assert accelerator.prepare(optimizer) is ready[3], "also what it was made of"
    assert accelerator.prepare_scheduler(schedule) is ready[0]


def test_optimizer_states_made_before_stay():
    _, model, optimizer, _ = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    assert repr(Accelerator(cpu=True).prepare(optimizer).state_dict()) == repr(before)


class _Foreign:
    pass


_Foreign.__module__ = "keras.src.models"


class _ForeignChild(_Foreign):
    __module__ = "__main__"


class OwnParts(Accelerator):
    """Brings its own parts of ``prepare``, as subclasses of Accelerate's do."""

    def prepare_model(self, model, device_placement=None):
        if self.num_processes == 1:
            return nn.DataParallel(model)
        return DistributedDataParallel(model, find_unused_parameters=True)

    def prepare_data_loader(self, data_loader, *args, **kwargs):
        self.seen = data_loader
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_optimizer(self, optimizer, device_placement=None):
        own = AcceleratedOptimizer(optimizer, scaler=self.scaler)
        self._optimizers.append(own)
        return own


def test_a_subclass_brings_its_own_parts_of_prepare():
    accelerator = OwnParts(cpu=True, gradient_accumulation_steps=2)
    accelerator.prepare_scheduler = lambda scheduler: scheduler
    given = parts()
    loader, model, optimizer, schedule = accelerator.prepare(*given)
    assert accelerator.seen is given[0]
    assert isinstance(model, nn.DataParallel)
    assert accelerator.unwrap_model(model) is given[1]
    assert accelerator._models == [model]
    assert accelerator._optimizers == [optimizer]
    assert schedule is given[3]
    assert accelerator.prepare(model) is model
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.float().expand(1, 2)).sum())
            optimizer.step()
    assert optimizer.num_steps == 2


@on_ranks(2)
def test_a_block_takes_lists_of_models_and_optimizers_and_exchanges_in_its_last_batch_alone():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    _, model, optimizer, _ = accelerator.prepare(*parts())
    for is_last in (False, True):
        with accelerator.accumulate([model], optimizer, nn.functional.mse_loss):
            assert accelerator.sync_gradients is is_last
            accelerator.backward(model(torch.full((1, 2), accelerator.process_index + 1.0)).sum())
        first, second = gather_object([model.module.weight.grad.tolist()])
        assert (first == second) == is_last


def test_an_object_of_another_framework_is_named():
    with pytest.raises(TypeError, match="_ForeignChild of keras"):
        Accelerator(cpu=True).prepare(nn.Linear(1, 1), _ForeignChild())


def test_placement_is_one_entry_an_object():
    accelerator = Accelerator(cpu=True)
    loader, model, *_ = accelerator.prepare(*parts(), device_placement=[False] * 4)
    assert loader.device is None
    with pytest.raises(ConfigError, match="got 2 objects and device_placement for 1"):
        accelerator.prepare(model, loader, device_placement=[True])
    for flag in (True, False):
        with pytest.raises(ConfigError, match=rf"device_placement={flag}\): expected a list"):
            accelerator.prepare(model, loader, device_placement=flag)


def test_what_was_prepared_goes_with_its_accelerator():
    """Workers that stay are collected in a cycle after 5 s each: torch joins them in vain there."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    _, model, optimizer, schedule = parts()
    stays = DataLoader(range(4), num_workers=1, persistent_workers=True)
    loader, *others = accelerator.prepare(stays, model, optimizer, schedule)
    before = {*multiprocessing.active_children()}
    assert sum(map(len, loader)) == 4
    (worker,) = {*multiprocessing.active_children()} - before
    gc.disable()
    try:
        del accelerator, loader, others, model, optimizer, schedule, stays
        # Torch itself waits 5 s for it.
        eventually(lambda: not worker.is_alive(), what="the worker has ended")
    finally:
        gc.enable()


def test_free_memory_forgets_everything():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, model, optimizer, _ = accelerator.prepare(*parts())
    with accelerator.accumulate(model):
        pass
    assert not accelerator.sync_gradients
    assert accelerator.free_memory(loader, model) == [None, None]
    assert accelerator.sync_gradients
    assert accelerator.step == 0
    assert accelerator.prepare(optimizer) is not None
    assert accelerator._prepared.schedulers == []


# ---- reports


def test_what_is_logged_reaches_the_run(monkeypatch):
    told = Told()
    be(told, monkeypatch)
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("mine", config={"lr": 1})
    accelerator.log(
        {
            "loss": torch.ones(1, requires_grad=True) * 2,
            "accuracy": np.float32(0.5),
            "array": np.array([3.0]),
            "flag": True,
            "eval": {"f1": 1, "deep": {"x": torch.tensor(4)}},
            "text": "no number",
            "many": torch.ones(2),
        },
        step=np.int64(7),
        log_kwargs={},
    )
    accelerator.log({"text": "again"})
    values = {"loss": 2, "accuracy": 0.5, "array": 3, "flag": 1, "eval/f1": 1, "eval/deep/x": 4}
    assert told.metrics == [(values, 7)]
    assert all(type(value) is float for value in told.metrics[0][0].values())
    assert told.notices == [
        "'text' is a str, no number: not shown",
        "'many' is a Tensor, no number: not shown",
    ]
    accelerator.end_training()


def test_progress_gives_the_items(capsys):
    accelerator = Accelerator(cpu=True)
    assert list(accelerator.progress(iter("ab"), desc="letters", total=2)) == ["a", "b"]
    assert "letters: 100%" in capsys.readouterr().err
    accelerator.print("hello", end="!")
    assert capsys.readouterr().out == "hello!"
    assert accelerator.should_stop is False


def profiled(folder):
    """A schedule that records the last two of four steps."""
    options = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2},
        output_trace_dir=folder,
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    model = nn.Linear(8, 8)
    with accelerator.profile() as profiler:
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            profiler.step()
    return accelerator.process_index


def test_a_profile_of_each_rank_shows_a_table(tmp_path):
    run = notebook_launcher(profiled, (str(tmp_path),), num_processes=2, view="none")
    for rank in run:
        trace = tmp_path / f"profile_{rank}.json"
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert "aten::linear" in names
        (table,) = run.state.ranks[rank].displays
        text = str(table.data["text/plain"])
        assert f"Rank {rank}: operators by their own time" in text
        assert "aten::addmm" in text
        assert "Self CPU" in text


# ---- many ranks


@on_ranks(2)
def test_models_of_several_ranks():
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True, comm_hook="fp16")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    me = accelerator.process_index
    torch.manual_seed(me)
    inner = Tiny()
    model = accelerator.prepare(inner)
    assert type(model) is DistributedDataParallel
    assert accelerator.unwrap_model(model) is inner
    assert inner.head.weight is inner.embed.weight
    assert model.gradient_as_bucket_view
    assert accelerator.prepare(model) is accelerator.prepare(inner) is model
    start = inner.embed.weight.tolist()
    assert gather_object([start]) == [start, start]
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert type(accelerator.prepare(frozen)) is nn.Linear
    teacher = accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    assert type(teacher) is nn.Linear
    assert type(accelerator.prepare(teacher)) is DistributedDataParallel
    names = list(Tiny().state_dict())
    assert list(accelerator.get_state_dict(model)) == names
    wrapped = accelerator.get_state_dict(model, unwrap=False)
    assert list(wrapped) == [f"module.{name}" for name in names]
    other = DistributedDataParallel(nn.Linear(1, 1))
    assert accelerator.prepare(other) is other
    assert OwnParts(cpu=True).prepare(nn.Linear(1, 1)).find_unused_parameters


@on_ranks(2)
def test_ranks_with_more_or_fewer_batches_train_together():
    accelerator = Accelerator(cpu=True)
    me = accelerator.process_index
    model = accelerator.prepare(nn.Linear(3, 1))
    loader = accelerator.prepare(DataLoader(torch.ones(3, 3), batch_size=1))
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer = accelerator.prepare(sharded)
    before, num_batches = model.module.weight.tolist(), 0
    with accelerator.join_uneven_inputs([model, optimizer], even_batches=False):
        for batch in loader:
            num_batches += 1
            model(batch).sum().backward()
            optimizer.step()
    assert (num_batches, len(list(loader))) == (2 - me, 2)
    weights = gather_object([model.module.weight.tolist()])
    assert weights[0] == weights[1] != before

    # Loaders that stay even are told of.
    batches = BatchSampler(SequentialSampler(range(3)), 1, drop_last=False)
    loaders = accelerator.prepare(
        DataLoader(torch.ones(3, 3), sampler=batches, batch_size=None),
        DataLoader(SizedStream(3)),
        accelerator.prepare_data_loader(DataLoader(SizedStream(3)), device_placement=False),
    )
    frozen = nn.Linear(2, 2).requires_grad_(False)
    lengths = []
    with warnings_about() as told:
        for joined in (model, frozen):
            with accelerator.join_uneven_inputs([joined], even_batches=False):
                lengths.append([len(each) for each in loaders])
    assert lengths == [[[2, 2, 2], [1, 2, 1]][me], [2, 2, 2]]
    assert [len(each) for each in loaders] == [2, 2, 2]
    assert len(told) == 2 - 2 * me, "said once for all"
    if told:
        stays, none = told
        assert "even_batches=False) is only supported for map-style datasets" in stays
        assert "other prepared loaders stay as they are" in stays
        assert "no effect, and loaders stay as they are" in none
        assert "it was given Linear" in none


@on_ranks(2)
def test_a_model_that_is_spread_already_is_refused_on_several_ranks_unless_asked_for():
    model = nn.Linear(1, 1)
    model.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(ConfigError, match=r"spread over 2 devices \(device_map\) and there are 2 "):
        Accelerator(cpu=True).prepare(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_BYPASS_DEVICE_MAP", "true")
        assert type(Accelerator(cpu=True).prepare(model)) is DistributedDataParallel


@pytest.mark.gpu
def test_everything_is_put_on_the_gpu_unless_told_not_to():
    accelerator = Accelerator()
    loader, model, *_ = accelerator.prepare(*parts())
    assert {weight.device for weight in model.parameters()} == {accelerator.device}
    assert next(iter(loader)).device == accelerator.device
    stays = Accelerator(device_placement=False)
    loader, model, *_ = stays.prepare(*parts())
    assert next(model.parameters()).device.type == next(iter(loader)).device.type == "cpu"


def test_a_knob_keeps_its_type_and_range():
    accelerator = Accelerator(cpu=True)
    knob = accelerator.knob("rate", 0.1, low=0.0)
    assert accelerator.knob("rate", 0.2, low=0.0) is knob
    for default, low in (("fast", None), (1, 0.0), (0.1, None)):
        with pytest.raises(ConfigError, match="made before with another type"):
            accelerator.knob("rate", default, low=low)
