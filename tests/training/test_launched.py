"""The Accelerator in ranks that the launcher started: what it reports, and what comes back."""

import math
import random
import sys
import warnings

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, ParallelismConfig, find_run, notebook_launcher, set_seed
from notebook_accel.launch.view.progress import progress_text
from notebook_accel.launch.view.summary import summary_lines
from notebook_accel.render.snapshot import render_snapshot

OF_TRAINING = ("torch.", "notebook_accel.")


def train():
    known = set(sys.modules)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    bare = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(torch.randn(32, 3), batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for step, batch in enumerate(accelerator.progress(loader, desc="train")):
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            bare.step()
            optimizer.zero_grad()
        accelerator.log({"loss": loss, "rank": accelerator.process_index}, step=step)
        assert not accelerator.should_stop
    accelerator.end_training()
    accelerator.wait_for_everyone()  # the group is the launcher's to end
    # What every training needs, the process has from which its rank was forked.
    assert [name for name in set(sys.modules) - known if name.startswith(OF_TRAINING)] == []
    assert accelerator.num_processes == 1 or type(model) is nn.parallel.DistributedDataParallel
    return accelerator.unwrap_model(model), model, optimizer, schedule


def test_a_launched_training_reports_and_comes_back_plain():
    run = notebook_launcher(train, num_processes=2, view="none")
    for model, wrapped, optimizer, schedule in run:
        assert type(wrapped) is nn.Linear
        assert type(optimizer) is torch.optim.AdamW
        assert type(schedule) is torch.optim.lr_scheduler.StepLR
        (group,) = optimizer.param_groups
        assert group["params"][0] is model.weight
        assert model(torch.ones(1, 3)).dtype == torch.float32
    assert torch.equal(run[0][0].weight, run[1][0].weight)
    assert {(m["name"], m["rank"]) for m in run.metrics} == {("loss", 0), ("rank", 0)}
    assert [m["step"] for m in run.metrics if m["name"] == "loss"] == list(range(8))
    assert {(bar.rank, bar.name, bar.n, bar.total) for bar in run.progress} == {
        (0, "train", 8, 8),
        (1, "train", 8, 8),
    }
    ranks = run.state.ranks
    assert [(one.batches, one.steps) for one in ranks] == [(8, 4), (8, 4)]
    told = [text for text in run.state.notices if "SGD was stepped without" in text]
    assert len(told) == 1


def warn_and_train(rate):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
    for step in range(4):
        # In the first step alone, as torch's own of its schedulers.
        warnings.warn("the gradients are strange", stacklevel=1)
        if accelerator.process_index == 1:
            warnings.warn("only here", RuntimeWarning, stacklevel=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("hidden", stacklevel=1)
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        accelerator.log({"loss": 0.1, "eval/accuracy": (0.25, 0.75, math.nan, 0.5)[step]}, step)


def test_the_summary_says_on_what_it_was_trained_and_how_the_best_value_and_warnings():
    run = notebook_launcher(warn_and_train, (0.1,), num_processes=2, view="none")
    lines = summary_lines(run.state, now=0.0)
    assert lines[1] == "2 x CPU, bf16, DDP, best eval/accuracy 0.75, 2 warnings"
    assert [line for line in lines if "⚠" in line] == [
        "⚠ UserWarning: the gradients are strange (ranks 0-1)",
        "⚠ RuntimeWarning: only here (rank 1)",
    ]
    assert "the gradients are strange" in run.logs(0)
    snapshot = render_snapshot(run.state)
    for words in ("2 x CPU, bf16, DDP ·", "best eval/accuracy 0.75 ·", "2 warnings</summary>"):
        assert words in snapshot["text/html"]
    assert snapshot["text/html"].count("the gradients are strange (ranks 0-1)") == 1
    # It is kept on disk, as the state is.
    assert summary_lines(find_run(run.id).state, now=0.0)[1] == lines[1]
    # A plain training on one device.
    alone = notebook_launcher(train, num_processes=1, view="none")
    assert summary_lines(alone.state, now=0.0)[1].startswith("1 x CPU, bf16, best loss ")


def forget_to_prepare():
    accelerator = Accelerator()
    model = nn.Linear(3, 1)
    for _ in range(2):
        accelerator.backward(model(torch.randn(2, 3)).square().mean())
    return model.weight


def test_a_model_that_nobody_prepared_is_told_of_once():
    run = notebook_launcher(forget_to_prepare, num_processes=2, view="none")
    told = [text for text in run.state.notices if "no model was prepared" in text]
    assert len(told) == 1
    assert "each of the 2 ranks trains a model of its own" in told[0]
    alone = notebook_launcher(forget_to_prepare, num_processes=1, view="none")
    assert not [text for text in alone.state.notices if "prepared" in text]


def train_and_validate():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = [DataLoader(torch.ones(length, 1)) for length in (12, 4)]
    model, optimizer, training, validation = accelerator.prepare(model, made, *loaders)
    for _ in range(2):
        for batch in training:
            accelerator.backward(model(batch).sum())
            optimizer.step()
        for batch in validation:
            model(batch)


def test_the_summary_counts_the_batches_of_the_loader_in_which_steps_are_made():
    run = notebook_launcher(train_and_validate, num_processes=2, view="none")
    said = {progress_text(rank) for rank in run.state.ranks}
    assert said == {"12 steps, 6/6 batches"}


# ---- what ``config=`` says reaches every Accelerator of the function, with no line in it

CONFIG = {
    "num_processes": 2,
    "devices": "cpu",
    "seed": 7,
    "gradient_accumulation_steps": 2,
    "fsdp": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20},
}


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def train_by_config():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    drawn = draw()
    set_seed(7)
    assert draw() == drawn
    accelerator = Accelerator()
    assert accelerator.gradient_accumulation_steps == 2
    model = accelerator.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    # The second layer has 18 weights.
    assert [isinstance(layer, FSDPModule) for layer in model] == [True, False]
    return str(accelerator.distributed_type.value)


def test_seed_accumulation_and_fsdp_come_from_the_config():
    run = notebook_launcher(train_by_config, config=CONFIG, view="none")
    assert list(run) == ["FSDP"] * 2
    assert summary_lines(run.state, now=0.0)[1] == "2 x CPU, float32, FSDP2"


def test_how_layers_are_divided_is_said():
    config = ParallelismConfig(tp_size=2, tp_plan={"0": "colwise"})

    def prepares():
        Accelerator(cpu=True, parallelism_config=config).prepare(nn.Sequential(nn.Linear(4, 4)))

    run = notebook_launcher(prepares, num_processes=2, view="none")
    assert summary_lines(run.state, now=0.0)[1] == "2 x CPU, float32, TP 2"
