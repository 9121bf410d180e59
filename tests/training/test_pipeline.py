"""Training through a pipeline equals the single process: schedules, replicas, windows, saving.

Tolerances are those of ``meshes``: micro-batches add up the same products in another order.
"""

import copy
from collections import OrderedDict
from functools import cache

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, ParallelismConfig
from notebook_accel.config.checks import too_old_torch
from notebook_accel.training.models import has_parts, weights_of
from notebook_accel.training.strategies.pipeline import balance
from tests.training.harness import refusal_of, run_ranks, skip_unless_it_runs, with_long_ones
from tests.training.meshes import (
    BY_RANK,
    FLOAT_ERROR,
    PIPELINES,
    THREE,
    WIDTH,
    WORDS,
    Block,
    Deep,
    accelerator_for,
    check_run,
    check_weights,
    data,
    loss_of,
    plugin,
    train,
    train_decoder,
    twin,
)
from tests.training.scripts.parts import gpt2


def chain():
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), Block(), nn.ReLU(inplace=True), Block(), nn.Linear(WIDTH, WORDS)
    )


def make(model, optimizer="adamw"):
    weights = list(model.parameters())
    # Groups across stages, in another order than the model's.
    groups = [{"params": weights[:3:-1], "lr": 2e-2}, {"params": weights[:4]}]
    if optimizer == "sgd":
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return model, torch.optim.AdamW(groups, lr=1e-2)


def evaluate(model):
    """What a trained model gives, and how much of it is here."""
    outputs = model.eval()(data(5).tensors[0]).tolist()
    return {"outputs": outputs, "parameters": sum(each.numel() for each in model.parameters())}


DECODER = {"make": lambda: make(Deep()), "whole": True, "batch": 4, "look": evaluate}
SEQUENTIAL = {**DECODER, "make": lambda: make(chain())}
CASES = {
    "decoder": DECODER,
    "sequential, uneven end": {**SEQUENTIAL, "make": lambda: make(chain(), "sgd"), "samples": 13},
    "accumulation, clipping a window": {**DECODER, "accumulate": 2, "clip": 0.05},
    "clipping the largest and by value": {
        **SEQUENTIAL,
        "clip": 0.005,
        "norm": "inf",
        "clip_value": 0.003,
    },
    "gradients exchanged at every batch": {**DECODER, "accumulate": 2, "each": True, "samples": 10},
}
# The matrix has the first; what writes files by rank trains as what does not.
TRAINED = [name for name in PIPELINES if name not in ("1F1B", BY_RANK)]


def train_all(pipelines):
    return {
        pipeline: {name: train(pipeline, case) for name, case in CASES.items()}
        for pipeline in pipelines
    }


@cache
def trained(ranks):
    """What each rank saw, of all pipelines of so many."""
    pipelines = [name for name in TRAINED if PIPELINES[name][0] == ranks]
    return run_ranks(train_all, ranks, pipelines, timeout=180)


def test_blocks_and_their_states_are_in_parts():
    results = run_ranks(parts_of_a_stage, 4)
    assert [names for names, _ in results] == [["dp_shard"]] * 4
    whole = [[f"{block}.down.bias", f"{block}.down.weight"] for block in (1, 3)]
    assert [names for _, names in results] == [whole[0], whole[0], whole[1], whole[1]]


def parts_of_a_stage():
    """Over which dimensions a stage's blocks are divided; and what of them is not, since the user
    named it as the whole model does."""
    ignoring = plugin(ignored_modules=r"blocks\.[13]\.down")
    accelerator = accelerator_for("1F1B, shards", fsdp_plugin=ignoring)
    model, optimizer = accelerator.prepare(*make(Deep()))
    inputs, targets = data(4).tensors
    accelerator.forward_backward(model, inputs, targets, loss_of)
    optimizer.step()
    divided = {name: own for name, own in model.blocks.named_parameters() if has_parts([own])}
    for weight in divided.values():
        assert weight.to_local().numel() == weight.numel() // 2
        assert optimizer.state[weight]["exp_avg"].to_local().shape == weight.to_local().shape
    whole = sorted(dict(model.blocks.named_parameters()).keys() - divided.keys())
    meshes = [weight.device_mesh.mesh_dim_names for weight in divided.values()]
    return sorted({name for names in meshes for name in names}), whole


@pytest.mark.timeout(240)
@pytest.mark.parametrize("pipeline", with_long_ones({p: PIPELINES[p][0] for p in TRAINED}))
@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_equals_one_process(name, pipeline):
    ranks, shares, _ = PIPELINES[pipeline]
    expected = twin(shares, CASES[name])
    for result in trained(ranks):
        ours = result[pipeline][name]
        assert list(ours["weights"]) == list(expected["weights"])
        check_run(ours, expected, CASES[name])
        check_weights({"": ours["outputs"]}, {"": expected["outputs"]}, 16 * FLOAT_ERROR)
        assert ours["parameters"] < expected["parameters"], "each rank has a part of the model"


def save_by_hand(folder):
    accelerator = accelerator_for(THREE)
    torch.manual_seed(3)
    plain = Deep().state_dict()
    model = accelerator.prepare(Deep())
    model.load_state_dict(plain)
    inner = accelerator.unwrap_model(model)
    accelerator.save({"model": inner.state_dict(), "epoch": 1}, f"{folder}/weights.pt")
    accelerator.save_model(model, f"{folder}/model")
    accelerator.wait_for_everyone()
    loaded = torch.load(f"{folder}/weights.pt", weights_only=True)["model"]
    return all(torch.equal(loaded[name], value) for name, value in plain.items())


def test_whole_weights_are_saved_and_loaded_by_hand(tmp_path):
    from safetensors.torch import load_model

    assert run_ranks(save_by_hand, 2, str(tmp_path)) == [True, True]
    model = Deep()
    load_model(model, tmp_path / "model" / "model.safetensors")
    torch.manual_seed(3)
    assert torch.equal(model.blocks[3].up.weight, Deep().blocks[3].up.weight)


def save_an_earlier_state(folder):
    accelerator = accelerator_for(THREE)
    torch.manual_seed(3)
    plain = {name: value.half() for name, value in Deep().state_dict().items()}
    model = accelerator.prepare(Deep())
    model.load_state_dict(plain)
    best = copy.deepcopy(accelerator.unwrap_model(model).state_dict())
    for name in best:
        best[name] = best[name].half()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    # Nor does it matter which Accelerator saves it.
    accelerator_for(THREE).save(best, f"{folder}/best.pt")
    accelerator.wait_for_everyone()
    loaded = torch.load(f"{folder}/best.pt", weights_only=True)
    return all(torch.equal(loaded[name], value) for name, value in plain.items())


def test_a_state_dict_is_saved_as_it_is(tmp_path):
    assert run_ranks(save_an_earlier_state, 2, str(tmp_path)) == [True, True]


def save_a_state_of_all_stages(folder):
    accelerator = accelerator_for(THREE)
    model, optimizer = accelerator.prepare(*make(Deep()))
    inputs, targets = data(4).tensors

    def train_and_save(name):
        accelerator.forward_backward(model, inputs, targets, loss_of)
        optimizer.step()
        accelerator.save_state(f"{folder}/{name}")
        return torch.load(f"{folder}/{name}/optimizer.bin")

    optimizer.load_state_dict(train_and_save("first"))
    steps = {int(one["step"]) for one in train_and_save("second")["state"].values()}
    at_stop = accelerator._strategy.own_optimizer_state(optimizer.optimizer)
    own = {index for index, weight in enumerate(weights_of(optimizer)) if weight.numel()}
    return steps == {2} and at_stop is not None and at_stop["state"].keys() == own


def test_a_state_of_all_stages_that_is_loaded_by_hand_does_not_last(tmp_path):
    assert run_ranks(save_a_state_of_all_stages, 2, str(tmp_path)) == [True, True]


def steps_of_a_stage():
    """How the optimizer of sharded blocks steps, and whether it has weights of all stages."""
    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(pp_size=2, dp_shard_size=2)
    )
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    return optimizer.param_groups[0]["foreach"], len(optimizer.param_groups[0]["params"]) == 8


@pytest.mark.long
def test_weights_of_other_stages_do_not_change_how_a_stage_steps():
    assert run_ranks(steps_of_a_stage, 4) == [(None, True)] * 4


def overflow(bad_rank):
    accelerator = accelerator_for(THREE, mixed_precision="fp16")
    torch.manual_seed(3)
    model = Deep()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, targets = data(4).tensors
    loss = accelerator.forward_backward(model, inputs, targets, loss_of)
    if accelerator.process_index == bad_rank:
        next(weight for weight in model.blocks.parameters()).grad.view(-1)[0] = float("inf")
    optimizer.step()
    return optimizer.step_was_skipped, float(loss)


def overflow_of_the_last_stage(frozen):
    """Each optimizer has weights, or gradients, in one of the two stages alone."""
    accelerator = accelerator_for(THREE, mixed_precision="fp16")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(not frozen)
    halves = [model] if frozen else model
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in halves]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    mse = nn.functional.mse_loss
    accelerator.forward_backward(model, torch.ones(4, 2), torch.ones(4, 2), mse)
    if accelerator.process_index:
        model[1].bias.grad[0] = float("inf")
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    skipped = [optimizer.step_was_skipped for optimizer in optimizers]
    assert accelerator.scaler is not None
    return skipped, accelerator.scaler.get_scale()


def overflows():
    return [
        *[overflow(bad_rank) for bad_rank in (1, -1)],
        *[overflow_of_the_last_stage(frozen) for frozen in (True, False)],
    ]


def test_an_overflow_in_one_stage_skips_the_step_of_all():
    here, there = run_ranks(overflows, 2)
    assert here == there
    (skipped, _), (taken, loss), of_frozen_half, of_halves = here
    assert (skipped, taken) == (True, False)
    assert of_frozen_half == ([True], 2.0**15)
    assert of_halves == ([False, True], 2.0**15)
    torch.manual_seed(3)
    inputs, targets = data(4).tensors
    whole = loss_of(Deep()(inputs), targets).item()
    assert loss == pytest.approx(whole, rel=2**-8)  # a few roundings to 11 bits


class NormBehind(nn.Module):
    """A running average that only the last stage gets to."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.norm = nn.BatchNorm1d(2)

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)


def averages():
    """How many batches a running average saw of one batch of three micro-batches, by where it is:
    in the first stage, in the last, behind the blocks."""
    first = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    last = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    found = []
    for given in (first, last, NormBehind()):
        accelerator = accelerator_for(THREE)
        model = accelerator.prepare(given)
        mse = nn.functional.mse_loss
        accelerator.forward_backward(model, torch.randn(12, 2), torch.randn(12, 2), mse)
        state = accelerator.get_state_dict(model)
        found += [int(value) for name, value in state.items() if "num_batches" in name]
    return found


class Masked(nn.Linear):
    """Rules out its last class."""

    def forward(self, inputs):
        return super().forward(inputs).masked_fill(torch.tensor([False, False, True]), -torch.inf)


def masked():
    """Whether loss and gradients are finite; the last of three micro-batches has no sample."""
    accelerator = accelerator_for(THREE)
    model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), Masked(2, 3)))
    targets = torch.tensor([0, 1, 1, 0])
    loss = accelerator.forward_backward(
        model, torch.ones(4, 2), targets, nn.functional.cross_entropy
    )
    gradients = [weight.grad.isfinite().all() for weight in model.parameters()]
    return bool(loss.isfinite()), bool(torch.stack(gradients).all())


def micro_batches():
    return averages(), masked()


def test_each_micro_batch_counts_once_and_an_empty_one_not_at_all():
    # Running averages know nothing of the run that tells torch the shapes.
    assert run_ranks(micro_batches, 2) == [([3, 3, 3], (True, True))] * 2


def train_transformers(kind, pipeline):
    import transformers

    torch.manual_seed(5)
    small = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    model = gpt2(4, 32)
    if kind == "Llama":
        config = transformers.LlamaConfig(vocab_size=32, num_hidden_layers=4, **small)
        model = transformers.LlamaForCausalLM(config)
    return train_decoder(accelerator_for(pipeline), model)


KINDS, CUTS = ("Llama", "GPT2"), ("1F1B", "Interleaved1F1B")


def train_all_transformers(pipelines):
    return {(kind, cut): train_transformers(kind, cut) for kind in KINDS for cut in pipelines}


@pytest.fixture(scope="module")
def transformers_trained():
    """What one process gives, and each of two ranks."""
    pytest.importorskip("transformers")
    models = ("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2")
    (alone,) = run_ranks(train_all_transformers, 1, (None,), imports=models)
    return alone, run_ranks(train_all_transformers, 2, CUTS, imports=models)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pipeline", CUTS)
def test_a_transformers_decoder_is_cut(kind, pipeline, transformers_trained):
    alone, ranks = transformers_trained
    expected = alone[kind, None]
    for result in (rank[kind, pipeline] for rank in ranks):
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        check_weights({"": result["logits"]}, {"": expected["logits"]}, 1e-5)


def plain_loops():
    return [plain_loop(part) for part in ("call", "backward")]


def plain_loop(part):
    accelerator = accelerator_for(THREE)
    model = accelerator.prepare(Deep())
    inputs, targets = data(4).tensors
    if part == "call":
        return refusal_of(lambda: model(inputs))
    loss = loss_of(model.eval()(inputs), targets)
    return refusal_of(lambda: accelerator.backward(loss))


def test_a_plain_loop_is_told_what_to_call():
    for both in run_ranks(plain_loops, 2):
        for said in both:
            assert "call accelerator.forward_backward(model, inputs, targets, loss_fun" in said


def refusal_of_an_old_torch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda _: "2.10.0+cpu")
        too_old_torch.cache_clear()
        return refusal_of(lambda: accelerator_for("1F1B"))


def test_an_old_torch_is_told():
    said = (
        "pipelines: torch 2.10.0+cpu is installed, and torch 2.11 or newer is needed: "
        "pip install 'torch>=2.11', then restart the kernel"
    )
    assert run_ranks(refusal_of_an_old_torch, 2) == [said] * 2


class Skips(Deep):
    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.head(self.blocks[3](self.blocks[0](hidden)))


def refusals():
    return [refusal(name) for name in REFUSED]


def refusal(name):
    shared, activation = nn.Linear(2, 2), nn.ReLU()
    models = {
        "one layer": nn.Linear(4, 3),
        "too few": nn.Sequential(nn.Linear(4, 3)),
        "shared": nn.Sequential(OrderedDict(first=shared, middle=nn.ReLU(), last=shared)),
        "activation": nn.Sequential(
            nn.Embedding(WORDS, 4), activation, nn.Linear(4, 2), activation, nn.Linear(2, 2)
        ),
        "skips": Skips(),
    }
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    inputs, _ = data(4).tensors
    return refusal_of(lambda: accelerator.prepare(models[name]).eval()(inputs))


REFUSED = {
    "one layer": "Linear has no nn.Sequential or nn.ModuleList of 2 or",
    "too few": "Sequential has no nn.Sequential or nn.ModuleList of 2 or",
    "activation": "accepted",
    "shared": "'first.weight' and 'last.weight' are one weight",
}


def test_what_cannot_be_cut_is_refused():
    skip_unless_it_runs("pipeline")
    for of_rank in run_ranks(refusals, 2):
        for message, said in zip(REFUSED.values(), of_rank, strict=True):
            assert message in said


def test_a_model_that_leaves_blocks_out_is_refused():
    with pytest.raises(AssertionError, match=r"blocks \[0, 1\] of blocks, and .* ran \[0\]"):
        run_ranks(refusal_of_first, 2)


def refusal_of_first():
    said = refusal("skips")
    raise AssertionError(said)


def test_stages_are_balanced():
    assert balance([1, 1, 1, 1], 2) == [2, 4]
    assert balance([1, 1, 1, 1, 1], 2) == [3, 5]
    assert balance([9, 1, 1, 1], 2) == [1, 4]
    assert balance([0, 4, 0, 4, 0], 2) == [3, 5]
    assert balance([1, 2, 3], 3) == [1, 2, 3]
