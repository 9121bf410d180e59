"""DeepSpeed's ZeRO trains as the single process does: stages, precisions, windows, checkpoints.

Several cases run in a launch: DeepSpeed's import and its first engine take a rank some seconds, a
case after that 0.1 to 1 s. Tolerances are those of ``meshes``. Under bf16 DeepSpeed keeps weights
in 16 bits beside those that it steps, so each product is rounded once and each weight once more.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import patch_environment
from notebook_accel.utils import DummyOptim, DummyScheduler, get_active_deepspeed_plugin
from safetensors.torch import load_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, ConfigError, DeepSpeedPlugin
from tests.training import meshes, resuming
from tests.training.harness import on_ranks, run_ranks
from tests.training.parts import bert

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


CASES = {
    "plain": {},
    "uneven end": {"optimizer": "sgd", "samples": 13},
    "accumulation, clipping a window": {"accumulate": 2, "clip": 0.05, "whole": True},
    "accumulation, uneven end": {"accumulate": 3, "optimizer": "sgd", "samples": 14},
    "bf16": {"precision": "bf16", "accumulate": 2, "clip": 0.5, "optimizer": "sgd"},
    "fp16": {"precision": "fp16", "accumulate": 2, "clip": 0.5, "optimizer": "sgd"},
}
ROUNDING = {name: meshes.ROUNDING[name] for name in ("bf16", "fp16")}


@pytest.fixture(scope="module")
def trained():
    return run_ranks(train_all, 2, CASES, timeout=240)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ROUNDING])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_equals_one_process(kind, name, trained):
    expected = meshes.twin(2, CASES[name])
    for rank, result in enumerate(trained):
        ours = result[kind][name]
        if rank:  # weights in parts are joined on the first rank alone
            ours = {**ours, "weights": expected["weights"]}
        meshes.check_run(ours, expected, CASES[name])


def distance(one, other):
    return max(
        (torch.tensor(value) - torch.tensor(other[name])).abs().max().item()
        for name, value in one.items()
    )


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("kind", KINDS)
def test_16_bits_stay_near_full_precision(kind, precision, trained):
    expected, rounding = meshes.twin(2, CASES[precision]), ROUNDING[precision]
    for result in trained:
        ours = result[kind][precision]
        assert ours["losses"] == pytest.approx(expected["losses"], rel=8 * rounding)
        assert ours["losses"] != expected["losses"]
        assert ours["norms"] == pytest.approx(expected["norms"], rel=64 * rounding)


@pytest.mark.timeout(200)
@on_ranks(2, timeout=150)
def test_an_overflow_in_fp16_leaves_the_step_out():
    zero_accelerator("stage 1")
    compute_in_fp16()
    for fields in KINDS.values():
        for power in (40, 8):
            plugin = DeepSpeedPlugin(**fields)
            plugin.deepspeed_config["fp16"] = {"enabled": "auto", "initial_scale_power": power}
            accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="fp16")
            model, optimizer = accelerator.prepare(*meshes.make({"optimizer": "sgd"}))
            before = meshes.weights_of(accelerator, model)
            accelerator.forward_backward(model, *meshes.data(4).tensors, meshes.loss_of)
            optimizer.step()
            assert optimizer.step_was_skipped == (power == 40)
            stayed = meshes.weights_of(accelerator, model) == before
            # Weights in parts are joined on the first rank alone.
            assert stayed == (power == 40) or not accelerator.is_main_process


# ---- checkpoints ---------------------------------------------------------------------------


RUNS = [(kind, precision) for kind in KINDS for precision in ("no", "bf16")]


def save_and_resume(folder):
    """Go on from the middle of each training to the bit; what each has after a step is returned."""
    weights = []
    for kind, precision in RUNS:
        plugin = DeepSpeedPlugin(**KINDS[kind])
        asked = {"deepspeed_plugin": plugin, "mixed_precision": precision}
        meshes.LAYOUTS["zero"] = (2, 2, lambda asked=asked: asked)
        place = f"{folder}/{kind}_{precision}"
        whole, rest = (
            resuming.train(place, "zero", samples=16, window=1, saves=lambda number: number == 8)
            for _ in range(2)
        )
        assert len(rest["losses"]) == 8
        assert {**whole["losses"], **rest["losses"]} == whole["losses"]
        accelerator = meshes.accelerator_for("zero")
        model, optimizer = accelerator.prepare(*meshes.make({}))
        accelerator.forward_backward(model, *meshes.data(4).tensors, meshes.loss_of)
        optimizer.step()
        accelerator.save_state(f"{place}_state")
        accelerator.save_model(model, f"{place}_model")
        state = accelerator.get_state_dict(model)
        assert {value.dtype for value in state.values()} <= {torch.float32}
        weights.append({name: value.tolist() for name, value in state.items()})
    return weights


def load_alone(folder):
    """Read checkpoints of DeepSpeed without it, in one process."""
    weights = []
    for kind, precision in RUNS:
        accelerator = meshes.accelerator_for(None)
        model, _ = accelerator.prepare(*meshes.make({"optimizer": "sgd"}))
        accelerator.load_state(f"{folder}/{kind}_{precision}_state")
        weights.append(meshes.weights_of(accelerator, model))
    return weights


@pytest.mark.timeout(300)
def test_resumed_training_is_the_same_to_the_bit_and_weights_are_whole(tmp_path):
    # Weights in parts are joined on the first rank alone.
    saved, _ = run_ranks(save_and_resume, 2, str(tmp_path), timeout=200)
    (alone,) = run_ranks(load_alone, 1, str(tmp_path))
    for (kind, precision), expected, loaded in zip(RUNS, saved, alone, strict=True):
        assert distance(loaded, expected) == 0
        model = meshes.Tiny()
        load_model(model, tmp_path / f"{kind}_{precision}_model" / "model.safetensors")
        exported = {name: value.tolist() for name, value in model.state_dict().items()}
        assert distance(exported, expected) == 0


# ---- configurations ------------------------------------------------------------------------


class Wide(nn.Module):
    """A model with what the configuration of a Transformers model says."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(hidden_size=8)
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.layer(inputs)


def automatic(names):
    return dict.fromkeys(names.split(), "auto")


AUTOMATIC = {
    **automatic("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"),
    **automatic("gradient_clipping"),
    "bf16": automatic("enabled"),
    "optimizer": {"type": "AdamW", "params": automatic("lr betas eps")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": automatic("warmup_min_lr warmup_max_lr warmup_num_steps total_num_steps"),
    },
    "zero_optimization": {
        "stage": 3,
        **automatic("reduce_bucket_size stage3_prefetch_bucket_size sub_group_size"),
        **automatic("stage3_param_persistence_threshold"),
    },
}


def train_by_a_file(folder):
    """Automatic entries are filled in; the configuration's optimizer and scheduler train."""
    plugin = DeepSpeedPlugin(hf_ds_config=f"{folder}/ds.json")
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    model = Wide()
    optimizer = DummyOptim(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    scheduler = DummyScheduler(optimizer, total_num_steps=16, warmup_num_steps=4)
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    assert accelerator.deepspeed_engine_wrapped.engine is model
    kinds = [type(one).__name__ for one in (model, optimizer, scheduler)]
    assert kinds == [
        f"DeepSpeed{kind}" for kind in ("Engine", "OptimizerWrapper", "SchedulerWrapper")
    ]
    assert get_active_deepspeed_plugin(accelerator.state) is plugin
    assert str(accelerator.distributed_type) == "DEEPSPEED"
    filled = accelerator.deepspeed_config
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
    rates = []
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    # Four batches, two a step; the first step's rate is that of no step at all.
    assert len(rates) == 4
    assert rates[0] == rates[1] == rates[2] < rates[3]


REFUSED = [
    ({"fp16": {"enabled": True}}, {"mixed_precision": "bf16"}, "'bf16', and .* fp16.enabled: true"),
    (
        {"optimizer": {"type": "AdamW", "params": {}}},
        {},
        "got a SGD, and .* has the section 'optimizer'",
    ),
]


def refuse_what_differs(_):
    model, loader = Wide(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for changed, settings, message in REFUSED:
        plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, **changed})
        with pytest.raises(ConfigError, match=message):
            Accelerator(cpu=True, deepspeed_plugin=plugin, **settings).prepare(
                model, optimizer, loader
            )


def train_by_environment(_):
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_GRADIENT_CLIPPING": "0.05",
    }
    with patch_environment(**variables):
        losses = meshes.train(None, {"optimizer": "sgd", "accumulate": None})["losses"]
    # Nobody but DeepSpeed clips here.
    expected = meshes.twin(2, {"optimizer": "sgd", "accumulate": 2, "clip": 0.05})["losses"]
    assert losses == pytest.approx(expected, abs=16 * meshes.FLOAT_ERROR)


def train_beside_a_teacher(_):
    """Two models, each with a configuration of its own: one is trained, one only asked."""
    student, teacher = zero_accelerator("stage 2"), zero_accelerator("stage 3")
    model, optimizer = student.prepare(*meshes.make({"optimizer": "sgd"}))
    judge = meshes.make({})[0]
    judge = teacher.prepare_model(judge, evaluation_mode=True)
    inputs, targets = meshes.data(4).tensors
    with torch.no_grad():
        wanted = judge(inputs)
    first = nn.functional.mse_loss(model(inputs), wanted)
    assert float(first.detach()) == pytest.approx(0, abs=meshes.FLOAT_ERROR)
    student.backward(meshes.loss_of(model(inputs), targets))
    optimizer.step()
    assert nn.functional.mse_loss(model(inputs), wanted) > 1e-4
    in_parts = [any(hasattr(w, "ds_id") for w in one.parameters()) for one in (model, judge)]
    assert in_parts == [False, True]
    whole = sum(value.numel() for value in teacher.get_state_dict(judge).values())
    numbers = sum(value.numel() for value in meshes.Tiny().state_dict().values())
    # Weights in parts are joined on the first rank of a machine alone.
    assert whole == (numbers if teacher.is_main_process else 0)


def drop_windows(_):
    """A third batch of four whose gradients are dropped counts as one that was never seen.

    In a window of one batch the loop drops them; an open window of two is dropped by a load.
    """
    for kind in KINDS:
        for window in (1, 2):
            dropped, never_seen = (dropped_loss(kind, window, sees) for sees in (True, False))
            assert dropped == pytest.approx(never_seen, abs=meshes.FLOAT_ERROR), (kind, window)


def dropped_loss(kind, window, sees_it):
    accelerator = zero_accelerator(kind, gradient_accumulation_steps=window)
    model, optimizer = accelerator.prepare(*meshes.make({"optimizer": "sgd"}))
    batches = list(zip(*(part.split(4) for part in meshes.data(16).tensors), strict=True))
    for number, (inputs, targets) in enumerate(batches):
        with accelerator.accumulate(model):
            if number != 2 or sees_it:
                accelerator.backward(meshes.loss_of(model(inputs), targets))
            if number != 2:
                optimizer.step()
                optimizer.zero_grad()
            elif window == 1:
                optimizer.zero_grad()
            else:
                optimizer.drop_gradients()
    inputs, targets = batches[0]
    return float(meshes.loss_of(model(inputs), targets).detach())


def words(rank):
    return {"input_ids": torch.arange(8).view(2, 4) + rank, "labels": torch.tensor([0, 1])}


def train_what_was_read_in_parts(folder):
    """A model that is in parts from the moment Transformers has read it."""
    from transformers import BertForSequenceClassification

    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = BertForSequenceClassification.from_pretrained(folder)
    assert all(hasattr(weight, "ds_id") for weight in model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for expected in json.loads(Path(folder, "losses").read_text()):
        loss = model(**words(accelerator.process_index)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = float(accelerator.reduce(loss.detach(), "mean"))
        assert mean == pytest.approx(expected, abs=10 * meshes.FLOAT_ERROR)


USES = [
    *(train_by_a_file, refuse_what_differs, train_by_environment, train_beside_a_teacher),
    *(drop_windows, train_what_was_read_in_parts),
]


def use_all(folder):
    for use in USES:
        use(folder)


@pytest.mark.timeout(300)
def test_configurations_of_files_of_the_environment_and_of_several_models(tmp_path):
    model = bert()
    model.save_pretrained(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = (model(**words(0)).loss + model(**words(1)).loss) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    (tmp_path / "losses").write_text(json.dumps(losses))
    (tmp_path / "ds.json").write_text(json.dumps(AUTOMATIC))
    run_ranks(use_all, 2, str(tmp_path), timeout=200)
