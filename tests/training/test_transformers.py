"""Decoders of Transformers train in parts as on one rank: divided layers, sequences and stages."""

from functools import partial

import pytest
import torch

from notebook_accel import Accelerator, ParallelismConfig
from notebook_accel.training.collectives import num_ranks
from notebook_accel.training.models import has_parts
from tests.training import meshes
from tests.training.harness import run_ranks, runs_here, skip_unless_it_runs
from tests.training.parts import gpt2

pytest.importorskip("transformers")

KINDS = ("gpt2", "llama", "phi3", "qwen3")
SIZES = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}


def decoder(kind, num_hidden_layers=2, tied=False):
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, **HEADS, num_hidden_layers=num_hidden_layers, tie_word_embeddings=tied
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def read(folder):
    """A model whose layers Transformers divides as it reads them."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    is_divided = num_ranks() > 1
    asked = {"distributed_config": DistributedConfig(tp_size=2)} if is_divided else {}
    model = LlamaForCausalLM.from_pretrained(folder, **asked)
    assert has_parts(model.parameters()) == is_divided
    return model


STAGES = {"pp_size": 2, "num_microbatches": 2}
INTERLEAVED = {"pp_size": 2, "pp_schedule": "Interleaved1F1B"}
# What two ranks are asked to divide, and the model.
WAYS = {
    "Llama by its plan, tied": ({"tp_size": 2}, partial(decoder, "Llama", tied=True)),
    # With a norm of each head.
    "Qwen3 by its plan": ({"tp_size": 2}, partial(decoder, "Qwen3")),
    # Whose layers give, and take, whole outputs.
    "Phi3 by its plan": ({"tp_size": 2}, partial(decoder, "Phi3")),
    "Llama, divided as it is read": ({"tp_size": 2}, read),
    # Outside of a block, where logits are asked, the whole sequence is computed.
    "Llama, divided sequences": ({"cp_size": 2}, partial(decoder, "Llama")),
    "Llama, 1F1B": (STAGES, partial(decoder, "Llama", 4)),
    "Llama, Interleaved1F1B": (INTERLEAVED, partial(decoder, "Llama", 4)),
    "GPT2, 1F1B": (STAGES, partial(gpt2, 4, 32)),
    "GPT2, Interleaved1F1B": (INTERLEAVED, partial(gpt2, 4, 32)),
}


def train(name, folder):
    sizes, make = WAYS[name]
    config = ParallelismConfig(**sizes) if num_ranks() > 1 else None
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = (make(folder) if make is read else make()).train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = {"losses": [], "norms": []}
    # Divided sequences take no padding.
    mask = torch.tensor([[int("cp_size" in sizes)] + [1] * 7, [1] * 8])
    for tokens in torch.randint(32, (4, 2, 8), generator=torch.Generator().manual_seed(1)):
        targets, batch = tokens.clone(), {"input_ids": tokens, "attention_mask": mask}
        buffers = [tokens, mask, targets]
        with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            loss = accelerator.forward_backward(model, batch, targets, loss_of)
        seen["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        accelerator.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
        seen["losses"].append(float(loss))
    logits = model.eval()(**batch).logits.tolist()
    return {**seen, "weights": {**meshes.weights_of(accelerator, model), "logits": logits}}


def loss_of(outputs, targets):
    return meshes.loss_of(outputs.logits, targets)


def train_all(folder):
    return {name: train(name, folder) for name in filter(runs_here, WAYS)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What one process gives, and each of two ranks."""
    folder = tmp_path_factory.mktemp("llama")
    decoder("Llama").save_pretrained(folder)
    modules = [f"transformers.models.{kind}.modeling_{kind}" for kind in KINDS]
    return [run_ranks(train_all, ranks, str(folder), imports=modules) for ranks in (1, 2)]


@pytest.mark.parametrize("name", WAYS)
def test_a_decoder_in_parts_trains_as_a_whole_one(name, trained):
    skip_unless_it_runs(name)
    (alone,), ranks = trained
    expected = alone[name]
    for ours in (rank[name] for rank in ranks):
        assert ours["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert ours["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        meshes.check_weights(ours["weights"], expected["weights"], 1e-5)
