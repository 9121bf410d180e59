"""Training over a device mesh equals the single process: shards, divided layers, replicas."""

import re
import warnings
from functools import cache

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from notebook_accel import (
    Accelerator,
    ConfigError,
    ParallelismConfig,
    PartialState,
    notebook_launcher,
    utils,
)
from tests.training.harness import refusal_of, run_ranks
from tests.training.meshes import (
    FLOAT_ERROR,
    MESHES,
    Block,
    Tiny,
    accelerator_for,
    blocks,
    check_run,
    check_weights,
    data,
    loss_of,
    train,
    train_decoder,
    twin,
    weights_of,
)
from tests.training.single import forget_states

CASES = {
    "plain": {},
    "uneven end, clipping the largest and by value, weights of rank 0": {
        "optimizer": "sgd",
        "samples": 13,
        "clip": 0.02,
        "norm": "inf",
        "clip_value": 0.01,
        "read_by_rank_0": True,
    },
    "accumulation, clipping a window, a window dropped": {
        "accumulate": 2,
        "clip": 0.05,
        "whole": True,
        "drops": (0, 2),
    },
}


def train_all(meshes):
    return {mesh: {name: train(mesh, case) for name, case in CASES.items()} for mesh in meshes}


@cache
def trained(ranks):
    """What each rank saw, on all meshes of so many: to start ranks takes as long as a mesh."""
    meshes = [name for name, (needed, _, _) in MESHES.items() if needed == ranks]
    return run_ranks(train_all, ranks, meshes, timeout=180)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_a_mesh_equals_one_process(name, mesh):
    ranks, shares, _ = MESHES[mesh]
    expected = twin(shares, CASES[name])
    for result in trained(ranks):
        check_run(result[mesh][name], expected, CASES[name], FLOAT_ERROR * 2 * 16 / shares)


def gather_counts():
    """What a step of raw ``fully_shard`` and of ours gathers; what is left after an evaluation."""
    counts = []
    accelerator = accelerator_for("fsdp, blocks")
    raw, ours = Tiny(), accelerator.prepare(Tiny())
    for part in (*raw.blocks, raw):
        fully_shard(part, mesh=accelerator.torch_device_mesh["dp_shard"])
    inputs, targets = data(2).tensors
    for model in (raw, ours):
        for _ in range(2):  # the first step learns the order
            with CommDebugMode() as exchanged:
                loss_of(model(inputs), targets).backward()
        counts.append(exchanged.get_comm_counts()[torch.ops.c10d._allgather_base_])
    with torch.no_grad():
        ours(inputs)
    return counts, all(isinstance(weight, DTensor) for weight in ours.parameters())


def ignored_weights():
    """What a rank has whole where a part inside of a checkpointed block is ignored."""
    accelerator = accelerator_for("fsdp, a function chooses, a part is ignored")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = accelerator.prepare(Tiny()).state_dict()
    return {name for name, value in state.items() if not isinstance(value, DTensor)}


def fill(module):
    torch.manual_seed(1)
    for weight in module.parameters(recurse=False):
        torch.nn.init.uniform_(weight)
    for values in module.buffers(recurse=False):
        values.fill_(0.25)


def filled_weights(syncs):
    """The weights of a model that no rank has read."""
    asked = {"param_init_fn": fill, "sync_module_states": syncs}
    accelerator = Accelerator(cpu=True, fsdp_plugin=blocks(**asked))
    with torch.device("meta"):
        model = Tiny()
    return weights_of(accelerator, accelerator.prepare(model))


def look_inside():
    filled = [filled_weights(syncs) for syncs in (True, False)]
    return {"gathers": gather_counts(), "ignored": ignored_weights(), "filled": filled}


@pytest.fixture(scope="module")
def inside():
    return run_ranks(look_inside, 2)


def test_no_more_is_gathered_than_by_torch_alone(inside):
    for result in inside:
        (of_torch, of_ours), is_in_parts = result["gathers"]
        assert of_ours == of_torch > 0
        assert is_in_parts


def test_modules_are_ignored_by_the_names_that_the_user_knows(inside):
    for result in inside:
        assert result["ignored"] == {"blocks.1.down.weight", "blocks.1.down.bias", "scale"}


def test_weights_that_nobody_has_read_are_filled(inside):
    model = Tiny().apply(fill)
    expected = {name: value.tolist() for name, value in model.state_dict().items()}
    for result in inside:
        assert result["filled"] == [expected, expected]


def look_around():
    accelerator = accelerator_for("fsdp x tensor")
    mesh = accelerator.torch_device_mesh
    return {
        "type": str(accelerator.distributed_type),
        "names": mesh.mesh_dim_names,
        "ranks": (accelerator.data_parallel_rank, accelerator.tensor_parallel_rank),
        "shard": accelerator.data_parallel_shard_rank,
        "others": (accelerator.pipeline_parallel_rank, accelerator.context_parallel_rank),
        "is_fsdp2": accelerator.is_fsdp2 and accelerator.is_composable_parallelism_enabled,
        "state": (accelerator.state.device_mesh is mesh, accelerator.state.is_fsdp2),
        "sizes": accelerator.parallelism_config.total_size,
        "bare": by_bare_functions(accelerator.process_index),
    }


def by_bare_functions(rank):
    """What the functions of ``utils`` join, and who gets which inputs."""
    with PartialState().split_between_processes(["a", "b", "c"]) as mine:
        words = utils.gather_object(mine)
    mine = torch.tensor([float(rank)])
    return (
        utils.gather(mine).tolist(),
        utils.reduce(mine).item(),
        utils.pad_across_processes(torch.ones(1 + rank // 2)).tolist(),
        words,
    )


def test_the_accelerator_tells_where_a_rank_stands():
    results = run_ranks(look_around, 4)
    assert [result["ranks"] for result in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [result["shard"] for result in results] == [0, 0, 1, 1]
    for result in results:
        assert result["type"] == "FSDP"
        assert result["names"] == ("dp_shard", "tp")
        assert result["is_fsdp2"]
        assert result["state"] == (True, True)
        assert result["sizes"] == 4
        assert result["others"] == (0, 0)
    # One rank of each share: neither what its neighbour in the layer has, nor its share again.
    words = ["a", "b", "c"]
    for rank, result in enumerate(results):
        others = [float(rank % 2), float(rank % 2 + 2)]
        assert result["bare"] == (others, sum(others) / 2, [1, float(rank > 1)], words)


def train_in_launcher():
    result = train("fsdp, blocks", {})
    return "ended", result["losses"]


def test_it_trains_in_launched_ranks():
    run = notebook_launcher(train_in_launcher, num_processes=2, view="none")
    expected = twin(2, {})["losses"]
    for said, losses in run:
        assert said == "ended"
        assert losses == pytest.approx(expected, abs=FLOAT_ERROR * len(expected))


REFUSED = [
    ({"tp_size": 3}, "takes 3 ranks .*tp 3.* and there are 2"),
    ({"tp_size": 2}, "divides layers by a plan, and Linear has none"),
    ({"tp_size": 2, "tp_plan": {"no.such": "colwise"}}, "no module of such a name"),
    ({"tp_size": 2, "tp_plan": {"0": "sideways"}}, "'sideways' for '0': expected one of"),
    ({"tp_size": 2, "tp_plan": {"0": "colwise"}}, r"of shape \(3, 4\) over 2 ranks"),
]


def test_what_cannot_be_divided_is_refused():
    for of_rank in run_ranks(refusals, 2):
        for said, (_, message) in zip(of_rank, REFUSED, strict=True):
            assert re.search(message, said)


# Qwen3 has a norm of each head; Phi3's layers give, and take, whole outputs.
OWN_PLANS = {"Llama": True, "Qwen3": False, "Phi3": False}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}


def train_by_own_plan(name, tp_size):
    import transformers

    settings = ParallelismConfig(tp_size=tp_size)
    accelerator = Accelerator(cpu=True, parallelism_config=settings)
    torch.manual_seed(0)
    sizes = {**SMALL, **HEADS, "pad_token_id": 0, "tie_word_embeddings": OWN_PLANS[name]}
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return train_decoder(accelerator, model)


def train_by_own_plans(tp_size):
    return {name: train_by_own_plan(name, tp_size) for name in OWN_PLANS}


def test_models_of_transformers_are_divided_by_their_own_plans():
    pytest.importorskip("transformers")
    models = (
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.phi3.modeling_phi3",
    )
    (whole,) = run_ranks(train_by_own_plans, 1, 1, imports=models)
    for result in run_ranks(train_by_own_plans, 2, 2, imports=models):
        for name, ours in result.items():
            expected = whole[name]
            assert ours["losses"] == pytest.approx(expected["losses"], abs=1e-5), name
            check_weights(ours["weights"], expected["weights"], 1e-5)


def refusals():
    return [refusal(asked) for asked, _ in REFUSED]


def refusal(asked):
    layer = torch.nn.Linear(4, 3)
    model = torch.nn.Sequential(layer) if "tp_plan" in asked else layer
    sizes = ParallelismConfig(**asked)
    return refusal_of(lambda: Accelerator(cpu=True, parallelism_config=sizes).prepare(model))


def test_sizes_are_checked_before_ranks_wait_for_each_other(monkeypatch):
    forget_states()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")  # whose other ranks never come
    for plugin, asked in ((None, {"dp_shard_size": 4}), (blocks(), {"tp_size": 4})):
        with pytest.raises(ConfigError, match=r"takes 4 ranks .* and there are 6"):
            Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**asked))
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"takes 2 ranks .* and there are 1"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))


def two_of_common_weights(layout):
    """What is said of two models with one embedding, and whether they train where it is frozen."""
    said = "accepted"
    for is_frozen in (False, True):
        accelerator = accelerator_for(layout)
        one, other = Tiny(), Tiny()
        one.embed.weight.requires_grad_(not is_frozen)
        other.embed.weight = other.head.weight = one.embed.weight
        weights = dict.fromkeys([*one.parameters(), *other.parameters()])
        optimizer = torch.optim.SGD(list(weights), lr=0.1)
        try:
            first, second, optimizer = accelerator.prepare(one, other, optimizer)
        except ConfigError as error:
            said = str(error)
            continue
        for model in (first, second):
            accelerator.forward_backward(model, *data(4).tensors, loss_of)
        optimizer.step()
    return said, is_frozen


def a_part_alone_and_within(frozen):
    accelerator = accelerator_for("fsdp")
    block = Block().requires_grad_(not frozen)
    around = torch.nn.Sequential(block, torch.nn.Linear(8, 2))
    return refusal_of(lambda: accelerator.prepare(block, around))


def lbfgs(layout):
    accelerator = accelerator_for(layout)
    model = Tiny()
    optimizer = torch.optim.LBFGS(model.parameters())
    return refusal_of(lambda: accelerator.prepare(model, optimizer))


def what_would_part():
    return {
        "common": {name: two_of_common_weights(name) for name in ("fsdp", "tensor", "1F1B")},
        "within": [a_part_alone_and_within(frozen) for frozen in (False, True)],
        "lbfgs": {name: lbfgs(name) for name in ("fsdp", "tensor", "1F1B")},
    }


def test_what_would_part_without_a_word_is_refused():
    """Weights that two models have, and a step that needs all weights of the model at once."""
    common = r"the weight 'embed\.weight' in common with a model that was prepared before"
    for found in run_ranks(what_would_part, 2):
        assert re.search(common, found["common"]["fsdp"][0])
        assert re.search(common, found["common"]["1F1B"][0])
        assert found["common"]["tensor"] == ("accepted", True), "kept whole, and so one weight"
        assert all("Prepare one module that has both" in said for said in found["within"])
        assert "steps all weights as one vector, and with tp_size=2" in found["lbfgs"]["tensor"]
        assert "steps all weights as one vector, and with pp_size=2" in found["lbfgs"]["1F1B"]
        assert found["lbfgs"]["fsdp"] == "accepted"


def overflow(mesh):
    accelerator = accelerator_for(mesh, mixed_precision="fp16")
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs, targets = data(4).tensors
    accelerator.forward_backward(model, inputs, targets, loss_of)
    if accelerator.is_last_process:
        # A part that this rank alone has.
        model.blocks[0].up.weight.grad.to_local().view(-1)[0] = float("inf")
    optimizer.step()
    assert accelerator.scaler is not None
    return optimizer.step_was_skipped, accelerator.scaler.get_scale()


def overflows(meshes):
    return [overflow(mesh) for mesh in meshes]


@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [(2, ["fsdp, blocks", "tensor"]), (4, ["fsdp x tensor", "replicas x fsdp"])],
)
def test_an_overflow_on_one_rank_skips_the_step_of_all(ranks, meshes):
    assert run_ranks(overflows, ranks, meshes) == [[(True, 2.0**15)] * len(meshes)] * ranks
