"""Ranks that divide each sequence train as one process does.

On the CPU, keys and values are gathered; torch's ring, which accelerators use, is marked gpu.
Tolerances are those of ``meshes``, and in bf16 and fp16 those of ``test_matrix``.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import (
    Accelerator,
    ConfigError,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    notebook_launcher,
)
from notebook_accel.training.settings.parallelism import (
    ParallelismConfig,
    TorchContextParallelConfig,
)
from tests.training import meshes
from tests.training.harness import on_ranks, run_ranks, with_long_ones
from tests.training.meshes import FLOAT_ERROR, SCALE, WIDTH, WORDS, check_weights, loss_of

LENGTH = 8
# name: ranks, shares of the data, sizes
CONTEXTS = {
    "context": (2, 1, {"cp_size": 2}),
    "shards x context": (4, 2, {"dp_shard_size": 2, "cp_size": 2}),
    "replicas x context": (4, 2, {"dp_replicate_size": 2, "cp_size": 2}),
    "context x tensor": (4, 1, {"cp_size": 2, "tp_size": 2}),
    # By ``make test-eight``.
    "shards x context x tensor": (8, 2, {"dp_shard_size": 2, "cp_size": 2, "tp_size": 2}),
}
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
CASES = {
    "causal": {},
    "both ways, accumulation, clipping": {"causal": False, "accumulate": 2, "clip": 0.05},
    "uneven end, whole calls": {"samples": 7, "whole": True},
    "bf16": {"precision": "bf16"},
    "bf16, accumulation": {"precision": "bf16", "accumulate": 2},
    "fp16": {"precision": "fp16"},
    "fp16, accumulation, clipping": {"precision": "fp16", "accumulate": 2, "clip": 0.05},
}
ROUNDING = {None: 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}


class Layer(nn.Module):
    """Attention over two heads, of which keys and values have one between them; and an MLP."""

    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        # No bias: a key's adds the same to all scores, and AdamW would step by what rounding
        # leaves of its gradient of zero.
        self.queries = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden):
        query = self.queries(hidden).unflatten(-1, (2, -1)).transpose(1, 2)
        key, value = (part.unsqueeze(1) for part in self.keys(hidden).chunk(2, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, enable_gqa=True
        )
        hidden = hidden + attended.transpose(1, 2).flatten(2)
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Decoder(nn.Module):
    """Embedding and head are one weight."""

    def __init__(self, causal=True):
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer(causal), Layer(causal)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, places):
        hidden = self.embed(tokens) + self.places(places)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def make(case):
    torch.manual_seed(3)
    model = Decoder(case.get("causal", True))
    # Where a gradient is next to nothing, AdamW would make a step of its rounding error.
    eps = 0.05 if "precision" in case else 1e-8
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)


def data(samples):
    return torch.randint(WORDS, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(7))


def places_of(tokens):
    return torch.arange(LENGTH).repeat(len(tokens), 1)


def train(sizes, case):
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.get("accumulate", 1),
        mixed_precision=case.get("precision"),
        kwargs_handlers=[GradScalerKwargs(init_scale=SCALE)],
        parallelism_config=ParallelismConfig(**sizes, tp_plan=PLAN),
    )
    model, optimizer = make(case)
    loader = DataLoader(data(case.get("samples", 8)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = {"losses": [], "norms": [], "samples": []}
    for batch in loader:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        places = places_of(inputs)
        whole = batch.clone()
        with (
            accelerator.accumulate(model),
            accelerator.maybe_context_parallel(
                buffers=[inputs, targets, places],
                buffer_seq_dims=[1, 1, 1],
                no_restore_buffers={places},
            ),
        ):
            assert inputs.shape[1] == LENGTH // 2
            if case.get("whole"):
                loss = accelerator.forward_backward(model, (inputs, places), targets, loss_of)
                parts = loss.expand(2)
            else:
                loss = loss_of(model(inputs, places), targets)
                accelerator.backward(loss)
                parts = parts_of(accelerator, loss.detach())
            if accelerator.sync_gradients and "clip" in case:
                norm = accelerator.clip_grad_norm_(model.parameters(), case["clip"])
                seen["norms"].append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(batch, whole)
        assert torch.equal(inputs, whole[:, :-1])
        seen["losses"].append(float(accelerator.reduce(parts.mean(), "mean")))
        seen["samples"] += accelerator.gather_for_metrics(inputs).tolist()
    state = accelerator.get_state_dict(model)
    return {**seen, "weights": {name: value.tolist() for name, value in state.items()}}


def parts_of(accelerator, loss):
    """The losses of the ranks that divide a sequence."""
    mesh = accelerator.torch_device_mesh
    parts = [torch.empty_like(loss) for _ in range(2)]
    torch.distributed.all_gather(parts, loss, group=mesh["cp"].get_group())
    return torch.stack(parts)


def twin(shares, name):
    case = CASES[name]
    tokens = data(case.get("samples", 8))
    return meshes.twin(
        shares,
        {
            **case,
            "make": lambda: make(case),
            "data": (tokens[:, :-1], tokens[:, 1:]),
            "call": lambda model, inputs: model(inputs, places_of(inputs)),
            "windows": [case.get("accumulate", 1)],
        },
    )


def check(context):
    """Train on this rank, case by case, and compare with the twin."""
    _, shares, sizes = CONTEXTS[context]
    for name, case in CASES.items():
        expected, mine = twin(shares, name), train(sizes, case)
        # Each product is rounded once: a loss of order 1 moves by a few roundings.
        rounding = ROUNDING[case.get("precision")]
        error = 16 * FLOAT_ERROR + 8 * rounding
        assert mine["losses"] == pytest.approx(expected["losses"], abs=error), name
        assert mine["norms"] == pytest.approx(expected["norms"], rel=1e-5 + 16 * rounding), name
        tokens = data(case.get("samples", 8))[:, :-1].tolist()
        assert sorted(mine["samples"]) == sorted(tokens)
        assert mine["weights"]["head.weight"] == mine["weights"]["embed.weight"], name
        check_weights(mine["weights"], expected["weights"], error)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "context", with_long_ones({name: row[0] for name, row in CONTEXTS.items() if row[0] < 8})
)
def test_divided_sequences_equal_one_process(context):
    run_ranks(check, CONTEXTS[context][0], context, timeout=180)


def train_transformers(context):
    import transformers

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    sizes = ParallelismConfig(cp_size=2) if context else None
    accelerator = Accelerator(cpu=True, parallelism_config=sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(16, (3, 9), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        mask = torch.ones_like(inputs)
        with accelerator.maybe_context_parallel(
            buffers=[inputs, targets, mask], buffer_seq_dims=[1, 1, 1]
        ):
            loss = accelerator.forward_backward(
                model,
                {"input_ids": inputs, "attention_mask": mask},
                targets,
                lambda outputs, targets: loss_of(outputs.logits, targets),
            )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    model.eval()
    with torch.no_grad():  # outside of a block the whole sequence is computed, as always
        outputs = model(input_ids=tokens[:, :-1], attention_mask=torch.ones(3, 8).long())
    return [*losses, float(loss_of(outputs.logits, tokens[:, 1:]))]


def test_a_transformers_decoder_divides_its_sequences():
    pytest.importorskip("transformers")
    models = ("transformers.models.llama.modeling_llama",)
    (expected,) = run_ranks(train_transformers, 1, False, imports=models)
    for losses in run_ranks(train_transformers, 2, True, imports=models):
        assert losses == pytest.approx(expected, abs=1e-5)


@on_ranks(2)
def test_sequences_of_one_length_after_the_other():
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    torch.manual_seed(3)
    for length in (8, 8, 16, 8, 4):
        whole = torch.randn(3, 1, 2, length, 4)
        expected = nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
        part = whole.clone()
        with accelerator.maybe_context_parallel(
            buffers=[part, expected], buffer_seq_dims=[3, 2], no_restore_buffers={expected}
        ):
            out = nn.functional.scaled_dot_product_attention(*part, is_causal=True)
            assert (out - expected).abs().max() < 1e-6


def test_elsewhere_the_block_changes_nothing():
    accelerator = Accelerator(cpu=True)
    tokens = torch.arange(6).reshape(2, 3)
    with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
        assert tokens.shape == (2, 3)


@pytest.mark.parametrize(
    ("length", "given", "message"),
    [
        (6, {"buffer_seq_dims": [1]}, r"of shape \(2, 6\) along dimension 1 into 4 pieces"),
        (8, {"buffers": None}, "got 0 buffers and 0 buffer_seq_dims"),
        (8, {"buffer_seq_dims": [1]}, "got a mask: expected is_causal=True"),
    ],
    ids=["length", "nothing", "mask"],
)
@on_ranks(2)
def test_what_cannot_be_divided_is_refused(length, given, message):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    heads = torch.zeros(1, 1, 4, 2)
    given = {"buffers": [torch.zeros(2, length)], **given}
    with pytest.raises(ConfigError, match=message), accelerator.maybe_context_parallel(**given):
        nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=heads)


def test_settings(monkeypatch):
    assert ParallelismConfig(cp_size=2).cp_handler.cp_comm_strategy == "allgather"
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    assert TorchContextParallelConfig().cp_comm_strategy == "alltoall"
    with pytest.raises(ConfigError, match="expected one of 'allgather', 'alltoall'"):
        TorchContextParallelConfig("ring")
    with pytest.raises(ConfigError, match="is a dict: expected a TorchContextParallelConfig"):
        ParallelismConfig(cp_size=2, cp_handler={})
    with pytest.raises(ConfigError, match="belong to DeepSpeed"):
        ParallelismConfig(sp_size=2)


def ring():
    """The largest difference of torch's ring to whole attention, with its gradients."""
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(cp_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    torch.manual_seed(3)
    shape = (3, 1, 2, 2 * 128, 16)
    whole = torch.randn(shape, device=accelerator.device, dtype=torch.bfloat16)
    part = whole.clone()
    with accelerator.maybe_context_parallel(buffers=[part], buffer_seq_dims=[3]):
        part = part.detach().clone().requires_grad_()
        out = nn.functional.scaled_dot_product_attention(*part, is_causal=True)
        out.sum().backward()
        seen = torch.stack([out.detach(), *part.grad])
    expected = whole.requires_grad_()
    rows = nn.functional.scaled_dot_product_attention(*expected, is_causal=True)
    rows.sum().backward()
    pieces = torch.stack([rows.detach(), *expected.grad]).chunk(4, dim=3)
    own = accelerator.context_parallel_rank
    mine = torch.cat([pieces[own], pieces[3 - own]], dim=3)
    return float((seen - mine).abs().max())


@pytest.mark.gpu
def test_the_ring_on_accelerators():
    """By ranks of a launch, which meet over NCCL: gloo gathers nothing that lies on a GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for distance in notebook_launcher(ring, num_processes=2, view="none"):
        assert distance < 0.1
