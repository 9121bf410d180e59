"""A device mesh: what is gathered, where a rank stands, what cannot be divided.

That training over one equals the single process, ``test_matrix`` shows.
"""

import warnings
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from notebook_accel import Accelerator, ConfigError, ParallelismConfig, PartialState, utils
from tests.training import meshes
from tests.training.harness import on_ranks, refusal_of, run_ranks
from tests.training.single import forget_states


@on_ranks(2)
def test_no_more_is_gathered_than_by_torch_alone():
    """In a step of raw ``fully_shard`` and of ours; weights are in parts after an evaluation."""
    counts = []
    accelerator = meshes.accelerator_for("fsdp, blocks")
    raw, ours = meshes.Tiny(), accelerator.prepare(meshes.Tiny())
    for part in (*raw.blocks, raw):
        fully_shard(part, mesh=accelerator.torch_device_mesh["dp_shard"])
    inputs, targets = meshes.data(2).tensors
    for model in (raw, ours):
        for _ in range(2):  # the first step learns the order
            with CommDebugMode() as exchanged:
                meshes.loss_of(model(inputs), targets).backward()
        counts.append(exchanged.get_comm_counts()[torch.ops.c10d._allgather_base_])
    with torch.no_grad():
        ours(inputs)
    assert counts[0] == counts[1] > 0
    assert all(isinstance(weight, DTensor) for weight in ours.parameters())


@on_ranks(2)
def test_modules_are_ignored_by_the_names_that_the_user_knows():
    """Where a part inside of a checkpointed block is ignored, a rank has it whole."""
    accelerator = meshes.accelerator_for("fsdp, a function chooses, a part is ignored")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = accelerator.prepare(meshes.Tiny()).state_dict()
    whole = {name for name, value in state.items() if not isinstance(value, DTensor)}
    assert whole == {"blocks.1.down.weight", "blocks.1.down.bias", "scale"}


@on_ranks(4)
def test_the_accelerator_tells_where_a_rank_stands():
    accelerator = meshes.accelerator_for("fsdp x tensor")
    rank, mesh = accelerator.process_index, accelerator.torch_device_mesh
    shard, part = divmod(rank, 2)
    assert accelerator.distributed_type == "FSDP"
    assert mesh.mesh_dim_names == ("dp_shard", "tp")
    assert [mesh[joined].size() for joined in ("dp", "dp_cp", "dp_shard_cp")] == [2, 2, 2]
    assert (accelerator.data_parallel_rank, accelerator.tensor_parallel_rank) == (shard, part)
    assert accelerator.data_parallel_shard_rank == shard
    assert (accelerator.pipeline_parallel_rank, accelerator.context_parallel_rank) == (0, 0)
    assert accelerator.is_fsdp2
    assert accelerator.is_composable_parallelism_enabled
    assert accelerator.state.device_mesh is mesh
    assert accelerator.state.is_fsdp2
    assert accelerator.parallelism_config.total_size == 4
    # The functions of utils join one rank of each share: neither what its neighbour in the layer
    # has, nor its share again.
    mine = torch.tensor([float(rank)])
    assert utils.gather(mine).tolist() == [part, part + 2]
    assert utils.reduce(mine).item() == part + 1
    assert utils.pad_across_processes(torch.ones(1 + shard)).tolist() == [1, shard]
    with PartialState().split_between_processes(["a", "b", "c"]) as words:
        assert utils.gather_object(words) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tp_size": 3}, "takes 3 ranks .*tp 3.* and there are 2"),
        ({"tp_size": 2}, "divides layers by a plan, and Linear has none"),
        ({"tp_size": 2, "tp_plan": {"no.such": "colwise"}}, "no module of such a name"),
        ({"tp_size": 2, "tp_plan": {"0": "sideways"}}, "'sideways' for '0': expected one of"),
        ({"tp_size": 2, "tp_plan": {"0": "colwise"}}, r"of shape \(3, 4\) over 2 ranks"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_divided_is_refused(asked, message):
    layer = torch.nn.Linear(4, 3)
    model = torch.nn.Sequential(layer) if "tp_plan" in asked else layer
    accelerator_of = partial(Accelerator, cpu=True, parallelism_config=ParallelismConfig(**asked))
    with pytest.raises(ConfigError, match=message):
        accelerator_of().prepare(model)


def test_sizes_are_checked_before_ranks_wait_for_each_other(monkeypatch):
    forget_states()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")  # whose other ranks never come
    for plugin, asked in ((None, {"dp_shard_size": 4}), (meshes.blocks(), {"tp_size": 4})):
        with pytest.raises(ConfigError, match=r"takes 4 ranks .* and there are 6"):
            Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**asked))
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"takes 2 ranks .* and there are 1"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))


def train_two(layout):
    accelerator = meshes.accelerator_for(layout)
    (one, first), (other, second) = (meshes.make({"optimizer": name}) for name in ("sgd", "adamw"))
    one, other, first, second = accelerator.prepare(one, other, first, second)
    inputs, targets = meshes.data(4).tensors
    for _ in range(2):
        for model, optimizer in ((one, first), (other, second)):
            accelerator.forward_backward(model, inputs, targets, meshes.loss_of)
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return [meshes.weights_of(accelerator, model) for model in (one, other)]


@pytest.mark.parametrize("layout", [None, "fsdp, blocks", "tensor", "1F1B"])
def test_two_models_train_each_as_alone(layout):
    (alone,) = run_ranks(train_two, 1, "single")
    for both in run_ranks(train_two, 2, layout):
        for ours, expected in zip(both, alone, strict=True):
            meshes.check_weights(ours, expected, 4 * meshes.FLOAT_ERROR)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("layout", ["fsdp", "tensor", "1F1B"])
@on_ranks(2)
def test_a_weight_that_two_models_have_is_frozen_or_kept_whole(layout, is_frozen):
    accelerator = meshes.accelerator_for(layout)
    one, other = meshes.Tiny(), meshes.Tiny()
    one.embed.weight.requires_grad_(not is_frozen)
    other.embed.weight = other.head.weight = one.embed.weight
    weights = dict.fromkeys([*one.parameters(), *other.parameters()])
    optimizer = torch.optim.SGD(list(weights), lr=0.1)
    if layout != "tensor" and not is_frozen:
        common = r"the weight 'embed\.weight' in common with a model that was prepared before"
        with pytest.raises(ConfigError, match=common):
            accelerator.prepare(one, other, optimizer)
        return
    *models, optimizer = accelerator.prepare(one, other, optimizer)
    inputs, targets = meshes.data(4).tensors
    for model in models:
        accelerator.forward_backward(model, inputs, targets, meshes.loss_of)
    optimizer.step()


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2)
def test_a_part_that_is_given_alone_and_within_is_refused(frozen):
    block = meshes.Block().requires_grad_(not frozen)
    around = torch.nn.Sequential(block, torch.nn.Linear(8, 2))
    with pytest.raises(ConfigError, match="Prepare one module that has both"):
        meshes.accelerator_for("fsdp").prepare(block, around)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ("fsdp", "accepted"),
        ("tensor", "steps all weights as one vector, and with tp_size=2"),
        ("1F1B", "steps all weights as one vector, and with pp_size=2"),
    ],
)
@on_ranks(2)
def test_a_step_of_all_weights_at_once_needs_them_all(layout, told):
    model = meshes.Tiny()
    optimizer = torch.optim.LBFGS(model.parameters())
    accelerator = meshes.accelerator_for(layout)
    assert told in refusal_of(lambda: accelerator.prepare(model, optimizer))


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [(2, ["fsdp, blocks", "tensor"]), (2, ["1F1B"]), (4, ["fsdp x tensor", "replicas x fsdp"])],
)
@on_ranks("ranks")
def test_an_overflow_on_one_rank_skips_the_step_of_all(ranks, layouts):
    for layout in layouts:
        accelerator = meshes.accelerator_for(layout, mixed_precision="fp16")
        model = meshes.Tiny()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs, targets = meshes.data(4).tensors
        accelerator.forward_backward(model, inputs, targets, meshes.loss_of)
        if accelerator.is_last_process:
            # A part that this rank alone has.
            parts = [w for name, w in model.named_parameters() if "up.weight" in name]
            gradient = next(part.grad for part in parts if part.grad is not None)
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.view(-1)[0] = float("inf")
        optimizer.step()
        assert optimizer.step_was_skipped
        assert accelerator.scaler.get_scale() == 2.0**15
