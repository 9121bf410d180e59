"""How a model gets from where the user made it to parts on every rank: memory, types, what is read.

Tolerances are those of ``meshes``.
"""

import os
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from notebook_accel import Accelerator
from notebook_accel.training.collectives import this_rank
from notebook_accel.training.models import has_parts
from notebook_accel.training.processes.topology import barrier
from tests.training import meshes
from tests.training.harness import on_ranks, run_ranks
from tests.training.parts import bert, gpt2

ROUNDING = 2.0**-8  # of bf16


class Immovable(meshes.Tiny):
    """A model for which no device has room."""

    def to(self, *args, **kwargs):
        raise MemoryError("the whole model was put on a device")


def names_in_parts(model):
    return {name for name, weight in model.named_parameters() if has_parts([weight])}


@on_ranks(2)
def test_no_whole_model_is_put_on_a_device():
    model = Accelerator(cpu=True, fsdp_plugin=meshes.blocks()).prepare(Immovable())
    assert names_in_parts(model) == {name for name, _ in model.named_parameters()}


def draw(module):
    torch.manual_seed(1)
    for weight in module.parameters(recurse=False):
        nn.init.uniform_(weight)
    for values in module.buffers(recurse=False):
        values.fill_(0.25)


@pytest.mark.parametrize("syncs", [True, False])
@on_ranks(2)
def test_weights_that_nobody_has_read_are_filled_where_one_whole_block_has_room(syncs):
    seen = []

    def fill(module):
        name = next(name for name, part in model.named_modules() if part is module)
        seen.append((name, names_in_parts(model)))
        draw(module)

    plugin = meshes.blocks(param_init_fn=fill, sync_module_states=syncs)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    with torch.device("meta"):
        model = meshes.Tiny()
    filled = meshes.weights_of(accelerator, accelerator.prepare(model))
    expected = meshes.Tiny().apply(draw).state_dict()
    assert filled == {name: value.tolist() for name, value in expected.items()}
    of_block = dict(meshes.Tiny().blocks[0].named_parameters())
    first, second = ({f"blocks.{block}.{name}" for name in of_block} for block in (0, 1))
    assert {name for name, _ in seen} > {"embed", "blocks.0.up", "blocks.1.up"}
    for name, parts in seen:
        known = {"blocks.0": set(), "blocks.1": first}
        assert parts == known.get(name[: len("blocks.0")], first | second), name


def rough(dtype=torch.bfloat16, frozen=False):
    """A model that was read in 16 bits, whose steps are each too small for a weight of 16 bits."""
    model = meshes.Tiny().bfloat16().to(dtype)
    model.blocks[1].up.requires_grad_(not frozen)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return model, torch.optim.SGD(weights, lr=1e-3)


def types(model):
    return {
        "types": {str(weight.dtype) for weight in model.parameters()},
        "frozen": str(model.blocks[1].up.weight.dtype),
    }


ROUGH = {"make": rough, "samples": 8, "look": types}
READ = {
    "whole": {**ROUGH, "precision": "bf16"},
    "frozen": {**ROUGH, "precision": "bf16", "make": partial(rough, frozen=True)},
    "no precision": ROUGH,
}


def train_read(layout, names):
    return {name: meshes.train(layout, READ[name]) for name in names}


@pytest.mark.parametrize(("ranks", "layout"), [(2, "fsdp, blocks"), (4, "fsdp x tensor")])
def test_weights_that_were_read_in_16_bits_are_stepped_in_32(ranks, layout):
    # One process that steps in float32, and rounds to bf16 what it computes with.
    alone = {**READ["whole"], "make": partial(rough, torch.float32)}
    start, expected = meshes.make(alone)[0].state_dict(), meshes.twin(2, alone)
    for result in run_ranks(train_read, ranks, layout, ["whole"]):
        ours = result["whole"]
        assert ours["types"] == {"torch.float32"}
        assert ours["losses"] == pytest.approx(expected["losses"], abs=8 * ROUNDING)
        for name, value in expected["weights"].items():
            moved = (torch.tensor(value) - start[name]).abs().max()
            mine = torch.tensor(ours["weights"][name])
            # Of the path, not of the weight: in 16 bits nothing would have moved.
            assert (mine - torch.tensor(value)).abs().max() <= 0.1 * moved, name


def test_what_does_not_train_and_plain_training_keep_their_16_bits():
    for result in run_ranks(train_read, 2, "fsdp, blocks", ["frozen", "no precision"]):
        assert result["frozen"]["frozen"] == "torch.bfloat16"
        assert result["frozen"]["types"] == {"torch.bfloat16", "torch.float32"}
        assert result["no precision"]["types"] == {"torch.bfloat16"}


def divide(accelerator, model):
    """Divide the layers before ``prepare``, as a user does it."""
    assert accelerator.torch_device_mesh is not None
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def dimensions(model):
    weight = model.blocks[0].up.weight
    return {"along": weight.device_mesh.mesh_dim_names if isinstance(weight, DTensor) else ()}


CASE = {"accumulate": 2, "clip": 0.05, "whole": True}
DIVIDED = {**CASE, "divide": divide, "look": dimensions}


@on_ranks(4)
def test_layers_that_were_divided_before_are_sharded_too():
    along = {"fsdp x tensor": {"dp_shard", "tp"}, "replicas x tensor": {"dp_replicate", "tp"}}
    for layout, names in along.items():
        ours = meshes.train(layout, DIVIDED)
        assert set(ours["along"]) >= names
        meshes.check_run(ours, meshes.twin(2, CASE), CASE)


@on_ranks(2, imports=("transformers.models.bert.modeling_bert",))
def test_transformers_is_told_that_rank_0_reads_for_all(tmp_path):
    from transformers import BertModel
    from transformers.integrations import is_fsdp_enabled

    whole, tokens = bert().bert, torch.arange(8).view(2, 4)
    if this_rank() == 0:
        whole.save_pretrained(tmp_path)
    barrier()
    before = {name: text for name, text in os.environ.items() if "FSDP" in name}
    accelerator = Accelerator(cpu=True, fsdp_plugin=meshes.plugin(cpu_ram_efficient_loading=True))
    assert is_fsdp_enabled()
    model = BertModel.from_pretrained(tmp_path)
    if not accelerator.is_main_process:  # what this rank need not have read
        model = model.to("meta")
    model = accelerator.prepare(model)
    outputs, expected = (each(input_ids=tokens).last_hidden_state for each in (model, whole))
    torch.testing.assert_close(outputs, expected)
    # An Accelerator without a plugin is not sharded by what the one before has told.
    assert Accelerator(cpu=True).distributed_type == "MULTI_CPU"
    assert not is_fsdp_enabled()
    assert before == {name: text for name, text in os.environ.items() if "FSDP" in name}


def train_adapters(folder, again):
    """LoRA in a frozen decoder, sharded as PEFT's examples say, or on one rank whole.

    Args:
        folder: where the adapter is saved.
        again: whether forwards are computed again in backward.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy

    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    torch.manual_seed(5)
    model = get_peft_model(gpt2(), config)
    accelerator = Accelerator(cpu=True, fsdp_plugin=meshes.plugin(activation_checkpointing=again))
    accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=1.0))
    ids = torch.randint(1, 20, (4, 5), generator=torch.Generator().manual_seed(1))
    size = 4 // accelerator.num_processes
    mine = ids[accelerator.process_index * size :][:size]
    losses = []
    for _ in range(4):
        loss = model(input_ids=mine, labels=mine).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    return {"losses": losses, "parts": names_in_parts(model) == set(dict(model.named_parameters()))}


def test_adapters_in_a_frozen_model_train_in_parts(tmp_path):
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    imports = ("transformers.models.gpt2.modeling_gpt2", "peft")
    (whole,) = run_ranks(train_adapters, 1, str(tmp_path / "one"), False, imports=imports)
    one = load_file(tmp_path / "one" / "adapter_model.safetensors")
    assert len(one) == 2
    for again in (False, True):
        folder = tmp_path / f"again {again}"
        for ours in run_ranks(train_adapters, 2, str(folder), again, imports=imports):
            assert ours["parts"]
            assert ours["losses"] == pytest.approx(whole["losses"], abs=1e-5)
            assert ours["losses"][-1] < ours["losses"][0]
        two = load_file(folder / "adapter_model.safetensors")
        assert one.keys() == two.keys()
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, atol=1e-5, rtol=0)
