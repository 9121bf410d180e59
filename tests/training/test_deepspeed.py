"""DeepSpeed's ZeRO trains as the single process does: stages, precisions, windows, checkpoints.

Several cases run in a launch: DeepSpeed's import and its first engine take a rank some seconds, a
case after that 0.1 to 1 s. Tolerances are those of ``meshes``. Under bf16 DeepSpeed keeps weights
in 16 bits beside those that it steps, so each product is rounded once and each weight once more.
"""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import patch_environment
from notebook_accel.utils import DummyOptim, DummyScheduler, get_active_deepspeed_plugin
from safetensors.torch import load_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, DeepSpeedPlugin
from tests.training import meshes
from tests.training.harness import refusal_of, run_ranks
from tests.training.meshes import (
    FLOAT_ERROR,
    Tiny,
    accelerator_for,
    data,
    loss_of,
    make,
    twin,
    weights_of,
)
from tests.training.scripts.parts import bert

pytest.importorskip("deepspeed")

# What the user asks for, by name.
KINDS = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "stage 2, states on the host": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
    "stage 3, all on the host": {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
    },
}


def zero_accelerator(kind, **settings):
    plugin = DeepSpeedPlugin(**KINDS[kind])
    return Accelerator(cpu=True, deepspeed_plugin=plugin, **settings)


def train_all(cases):
    """What each case comes to by each kind; a case is one of ``meshes``."""
    seen = {}
    for kind, fields in KINDS.items():
        # One plugin for all: what was filled in for one case does not count for the next.
        one = DeepSpeedPlugin(**fields)
        one.deepspeed_config["fp16"] = {"enabled": "auto", "initial_scale_power": 8}
        plugin = {"deepspeed_plugin": one}
        meshes.LAYOUTS["zero"] = (2, 2, lambda plugin=plugin: plugin)
        seen[kind] = {}
        for name, case in cases.items():
            if case.get("precision") == "fp16":
                compute_in_fp16()
            seen[kind][name] = meshes.train("zero", case)
    return seen


def compute_in_fp16():
    """DeepSpeed, imported before, refuses CPUs whose fp16 torch emulates."""
    device = sys.modules["deepspeed"].accelerator.get_accelerator()
    device.is_fp16_supported = lambda: True


def step_in_fp16(kind, scale_power):
    """Whether a step by such a loss scale was left out, and whether the weights stayed."""
    plugin = DeepSpeedPlugin(**KINDS[kind])
    plugin.deepspeed_config["fp16"] = {"enabled": "auto", "initial_scale_power": scale_power}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="fp16")
    model, optimizer = make({"optimizer": "sgd"})
    model, optimizer = accelerator.prepare(model, optimizer)
    before = weights_of(accelerator, model)
    accelerator.forward_backward(model, *data(4).tensors, loss_of)
    optimizer.step()
    return optimizer.step_was_skipped, weights_of(accelerator, model) == before


CASES = {
    "plain": {},
    "uneven end": {"optimizer": "sgd", "samples": 13},
    "accumulation, clipping a window": {"accumulate": 2, "clip": 0.05, "whole": True},
    "accumulation, uneven end": {"accumulate": 3, "optimizer": "sgd", "samples": 14},
    "bf16": {"precision": "bf16", "accumulate": 2, "clip": 0.5, "optimizer": "sgd"},
    "fp16": {"precision": "fp16", "accumulate": 2, "clip": 0.5, "optimizer": "sgd"},
}
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}


@pytest.fixture(scope="module")
def trained():
    return run_ranks(train_all, 2, CASES, timeout=240)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ROUNDING])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_equals_one_process(kind, name, trained):
    expected, steps = twin(2, CASES[name]), 16
    for rank, result in enumerate(trained):
        ours = result[kind][name]
        assert ours["losses"] == pytest.approx(expected["losses"], abs=FLOAT_ERROR * steps)
        assert ours["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        samples = data(CASES[name].get("samples", 16)).tensors[0].tolist()
        assert sorted(ours["samples"]) == sorted(2 * samples), "gathered, each counts once"
        if rank == 0:
            assert ours["weights"].keys() == expected["weights"].keys()
            assert distance(ours["weights"], expected["weights"]) <= FLOAT_ERROR * steps


def distance(one, other):
    return max(
        (torch.tensor(value) - torch.tensor(other[name])).abs().max().item()
        for name, value in one.items()
    )


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("kind", KINDS)
def test_16_bits_stay_near_full_precision(kind, precision, trained):
    expected, rounding = twin(2, CASES[precision]), ROUNDING[precision]
    for result in trained:
        ours = result[kind][precision]
        assert ours["losses"] == pytest.approx(expected["losses"], rel=8 * rounding)
        assert ours["losses"] != expected["losses"]
        assert ours["norms"] == pytest.approx(expected["norms"], rel=64 * rounding)


def overflows():
    zero_accelerator("stage 1")
    compute_in_fp16()
    return [[step_in_fp16(kind, power) for power in (40, 8)] for kind in KINDS]


@pytest.mark.timeout(200)
def test_an_overflow_in_fp16_leaves_the_step_out():
    first, second = run_ranks(overflows, 2, timeout=150)
    assert first == [[(True, True), (False, False)]] * len(KINDS)
    # Weights in parts are joined on the first rank alone.
    assert [[skipped for skipped, _ in each] for each in second] == [[True, False]] * len(first)


# ---- checkpoints ---------------------------------------------------------------------------


RUNS = [(kind, precision) for kind in KINDS for precision in ("no", "bf16")]


def save_and_resume(folder):
    return [resume_one(*run, f"{folder}/{run[0]}_{run[1]}") for run in RUNS]


def resume_one(kind, precision, folder):
    """Train an epoch, save, train another; then load into a new model and train that one again."""
    torch.manual_seed(5)
    accelerator, *ready = prepared(kind, precision)
    run_epoch(accelerator, *ready)
    accelerator.save_state(folder)
    unbroken = run_epoch(accelerator, *ready)
    torch.manual_seed(6)
    accelerator, *ready = prepared(kind, precision)
    run_epoch(accelerator, *ready)
    accelerator.load_state(folder)
    whole = accelerator.get_state_dict(ready[0])
    accelerator.save_model(ready[0], f"{folder}_model")
    return {
        "unbroken": unbroken,
        "resumed": run_epoch(accelerator, *ready),
        "types": {str(value.dtype) for value in whole.values()},
        "weights": {name: value.tolist() for name, value in whole.items()},
    }


def prepared(kind, precision):
    accelerator = zero_accelerator(kind, mixed_precision=precision)
    model, optimizer = make({})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader = DataLoader(data(16), batch_size=2, shuffle=True)
    return [accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)]


def run_epoch(accelerator, model, optimizer, loader, scheduler):
    losses = []
    for inputs, targets in loader:
        loss = loss_of(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        losses.append(optimizer.param_groups[0]["lr"])
    return losses


def load_alone(folder):
    """Read checkpoints of DeepSpeed without it, in one process."""
    weights = []
    for kind, precision in RUNS:
        accelerator = accelerator_for(None)
        model, optimizer = make({"optimizer": "sgd"})
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.load_state(f"{folder}/{kind}_{precision}")
        weights.append(weights_of(accelerator, model))
    return weights


@pytest.mark.timeout(300)
def test_resumed_training_is_the_same_to_the_bit_and_weights_are_whole(tmp_path):
    results = run_ranks(save_and_resume, 2, str(tmp_path), timeout=200)
    alone = run_ranks(load_alone, 1, str(tmp_path))[0]
    for number, (kind, precision) in enumerate(RUNS):
        for result in results:
            assert result[number]["resumed"] == result[number]["unbroken"]
        first = results[0][number]
        assert first["types"] == {"torch.float32"}
        assert distance(alone[number], first["weights"]) == 0
        model = Tiny()
        load_model(model, tmp_path / f"{kind}_{precision}_model" / "model.safetensors")
        exported = {name: value.tolist() for name, value in model.state_dict().items()}
        assert distance(exported, first["weights"]) == 0


# ---- configurations ------------------------------------------------------------------------


class Wide(nn.Module):
    """A model with what the configuration of a Transformers model says."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(hidden_size=8)
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.layer(inputs)


AUTOMATIC = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": "auto",
    },
}


def use_configurations(folder):
    """Configurations in a file, filled in; by the environment; what differs; several of them."""
    seen = {}
    plugin = DeepSpeedPlugin(hf_ds_config=f"{folder}/ds.json")
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    model = Wide()
    optimizer = DummyOptim(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    scheduler = DummyScheduler(optimizer, total_num_steps=16, warmup_num_steps=4)
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    assert accelerator.deepspeed_engine_wrapped.engine is model
    seen["filled"] = accelerator.deepspeed_config
    seen["kinds"] = [type(one).__name__ for one in (model, optimizer, scheduler)]
    seen["active"] = get_active_deepspeed_plugin(accelerator.state) is plugin
    seen["type"] = str(accelerator.distributed_type)
    rates = []
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    seen["rates"] = rates
    seen["betas"] = optimizer.param_groups[0]["betas"]
    seen["refusals"] = [refusal(*case) for case in REFUSED]
    seen["by environment"] = by_environment()
    seen["two models"] = train_beside_a_teacher()
    seen["dropped"] = drop_a_window()
    seen["read"] = read_in_parts(folder)
    return seen


def by_environment():
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_GRADIENT_CLIPPING": "0.05",
    }
    with patch_environment(**variables):
        accelerator = Accelerator(cpu=True)
    assert accelerator.deepspeed_plugin is not None
    model, optimizer = make({"optimizer": "sgd"})
    loader = DataLoader(data(16), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            losses.append(accelerator.forward_backward(model, inputs, targets, loss_of))
            optimizer.step()
            optimizer.zero_grad()
    return {
        "stage": accelerator.deepspeed_plugin.zero_stage,
        "losses": [float(accelerator.reduce(loss, "mean")) for loss in losses],
    }


def train_beside_a_teacher():
    """Two models, each with a configuration of its own: one is trained, one only asked."""
    student, teacher = zero_accelerator("stage 2"), zero_accelerator("stage 3")
    model, optimizer = make({"optimizer": "sgd"})
    model, optimizer = student.prepare(model, optimizer)
    judge = make({})[0]
    judge = teacher.prepare_model(judge, evaluation_mode=True)
    inputs, targets = data(4).tensors
    with torch.no_grad():
        wanted = judge(inputs)
    first = nn.functional.mse_loss(model(inputs), wanted)
    student.backward(loss_of(model(inputs), targets))
    optimizer.step()
    second = nn.functional.mse_loss(model(inputs), wanted)
    return {
        "apart": (float(first.detach()), float(second.detach())),
        "in parts": [any(hasattr(w, "ds_id") for w in one.parameters()) for one in (model, judge)],
        "whole": sum(value.numel() for value in teacher.get_state_dict(judge).values()),
    }


def drop_a_window():
    """What a third batch of four comes to where its gradients are dropped, and where it had none.

    In a window of one batch the loop drops them; an open window of two is dropped by a load.
    """
    return {
        f"{kind}, {window}": (dropped_loss(kind, window, True), dropped_loss(kind, window, False))
        for kind in KINDS
        for window in (1, 2)
    }


def dropped_loss(kind, window, sees_it):
    accelerator = zero_accelerator(kind, gradient_accumulation_steps=window)
    model, optimizer = make({"optimizer": "sgd"})
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = list(zip(*(part.split(4) for part in data(16).tensors), strict=True))
    for number, (inputs, targets) in enumerate(batches):
        with accelerator.accumulate(model):
            if number != 2 or sees_it:
                accelerator.backward(loss_of(model(inputs), targets))
            if number != 2:
                optimizer.step()
                optimizer.zero_grad()
            elif window == 1:
                optimizer.zero_grad()
            else:
                optimizer.drop_gradients()
    inputs, targets = batches[0]
    return float(loss_of(model(inputs), targets).detach())


def read_in_parts(folder):
    """A model that is in parts from the moment Transformers has read it."""
    from transformers import BertForSequenceClassification

    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = BertForSequenceClassification.from_pretrained(folder)
    are_parts = [hasattr(weight, "ds_id") for weight in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(2):
        loss = model(**words(accelerator.process_index)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return {"in parts": are_parts, "losses": losses}


def words(rank):
    return {"input_ids": torch.arange(8).view(2, 4) + rank, "labels": torch.tensor([0, 1])}


REFUSED = [
    ({"fp16": {"enabled": True}}, {"mixed_precision": "bf16"}, "'bf16', and .* fp16.enabled: true"),
    (
        {"optimizer": {"type": "AdamW", "params": {}}},
        {},
        "got a SGD, and .* has the section 'optimizer'",
    ),
]


def refusal(changed, settings, _):
    def prepare():
        plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, **changed})
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, **settings)
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
        accelerator.prepare(model, optimizer, loader)

    return refusal_of(prepare)


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    (folder / "ds.json").write_text(json.dumps(AUTOMATIC))
    bert().save_pretrained(folder)
    return run_ranks(use_configurations, 2, str(folder), timeout=200)


@pytest.mark.timeout(300)
def test_automatic_entries_are_filled_in(configured):
    for seen in configured:
        filled = seen["filled"]
        assert (filled["train_batch_size"], filled["gradient_accumulation_steps"]) == (16, 2)
        assert filled["train_micro_batch_size_per_gpu"] == 4
        assert filled["bf16"] == {"enabled": False}
        assert filled["optimizer"]["params"] == {"lr": 0.01, "betas": (0.8, 0.9)}, "eps: default"
        zero = {"reduce_bucket_size": 64, "stage3_prefetch_bucket_size": 57}
        zero |= {"stage": 3, "stage3_param_persistence_threshold": 80}
        assert filled["zero_optimization"] == zero
        schedule = {"warmup_min_lr": 0, "warmup_max_lr": 0.01}
        schedule |= {"warmup_num_steps": 2, "total_num_steps": 8}
        assert filled["scheduler"]["params"] == schedule, "two ranks move a schedule twice as fast"


def test_the_configurations_optimizer_and_scheduler_train(configured):
    for seen in configured:
        kinds = ["Engine", "OptimizerWrapper", "SchedulerWrapper"]
        assert seen["kinds"] == [f"DeepSpeed{kind}" for kind in kinds]
        assert seen["active"]
        assert seen["type"] == "DEEPSPEED"
        assert seen["betas"] == (0.8, 0.9)
        # Four batches, two a step; the first step's rate is that of no step at all.
        rates = seen["rates"]
        assert len(rates) == 4
        assert rates[0] == rates[1] == rates[2] < rates[3]


def test_what_differs_is_refused_with_both_values(configured):
    for said, (_, _, expected) in zip(configured[0]["refusals"], REFUSED, strict=True):
        assert re.search(expected, said)


def test_the_environment_chooses_it(configured):
    expected = twin(2, {"optimizer": "sgd", "accumulate": 2, "clip": 0.05})["losses"][:4]
    for seen in configured:
        assert seen["by environment"]["stage"] == 1
        assert seen["by environment"]["losses"] == pytest.approx(expected, abs=4 * FLOAT_ERROR)


def test_each_of_two_models_has_its_configuration(configured):
    numbers = sum(value.numel() for value in Tiny().state_dict().values())
    for rank, seen in enumerate(configured):
        first, second = seen["two models"]["apart"]
        assert first == pytest.approx(0, abs=FLOAT_ERROR)
        assert second > 1e-4
        assert seen["two models"]["in parts"] == [False, True]
        # Weights in parts are joined on the first rank of a machine alone.
        assert seen["two models"]["whole"] == (numbers if rank == 0 else 0)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_no_step_used_are_dropped(kind, window, configured):
    for seen in configured:
        dropped, never_seen = seen["dropped"][f"{kind}, {window}"]
        assert dropped == pytest.approx(never_seen, abs=FLOAT_ERROR)


def test_a_model_that_was_read_in_parts_trains(configured):
    model = bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = (model(**words(0)).loss + model(**words(1)).loss) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    for seen in configured:
        assert all(seen["read"]["in parts"])
        assert seen["read"]["losses"] == pytest.approx(losses, abs=10 * FLOAT_ERROR)
