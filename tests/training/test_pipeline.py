"""Pipelines: what a stage has, saves and loads, skips and refuses.

That training through one equals the single process, ``test_matrix`` shows.
"""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, ConfigError, ParallelismConfig
from notebook_accel.config.checks import too_old_torch
from notebook_accel.training.models import has_parts, weights_of
from notebook_accel.training.strategies.pipeline import balance
from tests.training import meshes
from tests.training.harness import on_ranks, refusal_of, run_ranks
from tests.training.test_matrix import in_groups


@on_ranks(4)
def test_blocks_and_their_states_are_in_parts():
    """But for what the user named as the whole model does."""
    ignoring = meshes.plugin(ignored_modules=r"blocks\.[13]\.down")
    accelerator = meshes.accelerator_for("1F1B, shards", fsdp_plugin=ignoring)
    model, optimizer = accelerator.prepare(*in_groups(meshes.Deep))
    inputs, targets = meshes.data(4).tensors
    accelerator.forward_backward(model, inputs, targets, meshes.loss_of)
    optimizer.step()
    divided = {name: own for name, own in model.blocks.named_parameters() if has_parts([own])}
    for weight in divided.values():
        assert weight.device_mesh.mesh_dim_names == ("dp_shard",)
        assert weight.to_local().numel() == weight.numel() // 2
        assert optimizer.state[weight]["exp_avg"].to_local().shape == weight.to_local().shape
    whole = dict(model.blocks.named_parameters()).keys() - divided.keys()
    block = 1 + 2 * (accelerator.process_index // 2)
    assert whole == {f"{block}.down.bias", f"{block}.down.weight"}


@on_ranks(2)
def test_a_state_dict_is_saved_as_it_is(tmp_path):
    accelerator = meshes.accelerator_for(meshes.THREE)
    torch.manual_seed(3)
    plain = {name: value.half() for name, value in meshes.Deep().state_dict().items()}
    model = accelerator.prepare(meshes.Deep())
    model.load_state_dict(plain)
    best = copy.deepcopy(accelerator.unwrap_model(model).state_dict())
    for name in best:
        best[name] = best[name].half()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    # Nor does it matter which Accelerator saves it.
    meshes.accelerator_for(meshes.THREE).save(best, tmp_path / "best.pt")
    accelerator.wait_for_everyone()
    loaded = torch.load(tmp_path / "best.pt", weights_only=True)
    assert all(torch.equal(loaded[name], value) for name, value in plain.items())


@on_ranks(2)
def test_a_state_of_all_stages_that_is_loaded_by_hand_does_not_last(tmp_path):
    accelerator = meshes.accelerator_for(meshes.THREE)
    model, optimizer = accelerator.prepare(*in_groups(meshes.Deep))
    inputs, targets = meshes.data(4).tensors

    def train_and_save(name):
        accelerator.forward_backward(model, inputs, targets, meshes.loss_of)
        optimizer.step()
        accelerator.save_state(tmp_path / name)
        return torch.load(tmp_path / name / "optimizer.bin")

    optimizer.load_state_dict(train_and_save("first"))
    steps = {int(one["step"]) for one in train_and_save("second")["state"].values()}
    at_stop = accelerator._strategy.own_optimizer_state(optimizer.optimizer)
    own = {index for index, weight in enumerate(weights_of(optimizer)) if weight.numel()}
    assert steps == {2}
    assert at_stop["state"].keys() == own


@pytest.mark.long
@on_ranks(4)
def test_weights_of_other_stages_do_not_change_how_a_stage_steps():
    """The optimizer of sharded blocks has weights of all stages."""
    sizes = ParallelismConfig(pp_size=2, dp_shard_size=2)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    Accelerator(cpu=True, parallelism_config=sizes).prepare(model, optimizer)
    assert optimizer.param_groups[0]["foreach"] is None
    assert len(optimizer.param_groups[0]["params"]) == 8


@pytest.mark.parametrize(("frozen", "skipped"), [(True, [True]), (False, [False, True])])
@on_ranks(2)
def test_an_overflow_in_one_stage_skips_the_step_of_all(frozen, skipped):
    """Each optimizer has weights, or gradients, in one of the two stages alone."""
    accelerator = meshes.accelerator_for(meshes.THREE, mixed_precision="fp16")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for weight in model.parameters():
        nn.init.constant_(weight, 0.1)  # large random ones overflow by themselves
    model[0].requires_grad_(not frozen)
    halves = [model] if frozen else model
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in halves]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    mse = nn.functional.mse_loss
    accelerator.forward_backward(model, torch.ones(4, 2), torch.zeros(4, 2), mse)
    if accelerator.process_index:
        model[1].bias.grad[0] = float("inf")
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    assert [optimizer.step_was_skipped for optimizer in optimizers] == skipped
    assert accelerator.scaler.get_scale() == 2.0**15


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


@on_ranks(2)
def test_each_micro_batch_counts_once():
    """In a running average in the first stage, in the last, and behind the blocks; it knows nothing
    of the run that tells torch the shapes."""
    first = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    last = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    for given in (first, last, NormBehind()):
        accelerator = meshes.accelerator_for(meshes.THREE)
        model = accelerator.prepare(given)
        mse = nn.functional.mse_loss
        accelerator.forward_backward(model, torch.randn(12, 2), torch.randn(12, 2), mse)
        state = accelerator.get_state_dict(model)
        assert [int(value) for name, value in state.items() if "num_batches" in name] == [3]


class Masked(nn.Linear):
    """Rules out its last class."""

    def forward(self, inputs):
        return super().forward(inputs).masked_fill(torch.tensor([False, False, True]), -torch.inf)


@on_ranks(2)
def test_an_empty_micro_batch_counts_not_at_all():
    """The last of three has no sample."""
    accelerator = meshes.accelerator_for(meshes.THREE)
    model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), Masked(2, 3)))
    targets = torch.tensor([0, 1, 1, 0])
    loss = accelerator.forward_backward(
        model, torch.ones(4, 2), targets, nn.functional.cross_entropy
    )
    assert loss.isfinite()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@on_ranks(2)
def test_a_plain_loop_is_told_what_to_call():
    accelerator = meshes.accelerator_for(meshes.THREE)
    model = accelerator.prepare(meshes.Deep())
    inputs, targets = meshes.data(4).tensors
    told = r"call accelerator\.forward_backward\(model, inputs, targets, loss_fun"
    with pytest.raises(ConfigError, match=told):
        model(inputs)
    loss = meshes.loss_of(model.eval()(inputs), targets)
    with pytest.raises(ConfigError, match=told):
        accelerator.backward(loss)


@on_ranks(2)
def test_an_old_torch_is_told():
    told = "pipelines: torch 2.10.0+cpu is installed, and torch 2.11 or newer is needed: "
    told += "pip install 'torch>=2.11', then restart the kernel"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda _: "2.10.0+cpu")
        too_old_torch.cache_clear()
        assert refusal_of(lambda: meshes.accelerator_for("1F1B")) == told


class Skips(meshes.Deep):
    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.head(self.blocks[3](self.blocks[0](hidden)))


def refusal(name):
    shared, activation = nn.Linear(2, 2), nn.ReLU()
    models = {
        "one layer": nn.Linear(4, 3),
        "too few": nn.Sequential(nn.Linear(4, 3)),
        "shared": nn.Sequential(OrderedDict(first=shared, middle=nn.ReLU(), last=shared)),
        "activation": nn.Sequential(
            nn.Embedding(meshes.WORDS, 4), activation, nn.Linear(4, 2), activation, nn.Linear(2, 2)
        ),
        "skips": Skips(),
    }
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    inputs, _ = meshes.data(4).tensors
    return refusal_of(lambda: accelerator.prepare(models[name]).eval()(inputs))


REFUSED = {
    "one layer": "Linear has no nn.Sequential or nn.ModuleList of 2 or",
    "too few": "Sequential has no nn.Sequential or nn.ModuleList of 2 or",
    "activation": "accepted",
    "shared": "'first.weight' and 'last.weight' are one weight",
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_cannot_be_cut_is_refused(name):
    assert REFUSED[name] in refusal(name)


def test_a_model_that_leaves_blocks_out_is_refused():
    with pytest.raises(AssertionError, match=r"blocks \[0, 1\] of blocks, and .* ran \[0\]"):
        run_ranks(refusal_of_first, 2)


def refusal_of_first():
    raise AssertionError(refusal("skips"))


def test_stages_are_balanced():
    assert balance([1, 1, 1, 1], 2) == [2, 4]
    assert balance([1, 1, 1, 1, 1], 2) == [3, 5]
    assert balance([9, 1, 1, 1], 2) == [1, 4]
    assert balance([0, 4, 0, 4, 0], 2) == [3, 5]
    assert balance([1, 2, 3], 3) == [1, 2, 3]
