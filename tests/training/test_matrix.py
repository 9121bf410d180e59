"""Every strategy equals one process in every case: losses, norms, weights, samples.

The twin is plain torch: one process, batches of all shares together, autocast and a loss scaler of
torch. The loop is the same under every strategy (see ``meshes``), with an optimizer made before
``prepare``, and embedding and head tied.

All strategies of one number of ranks train one after the other in the same ranks: to start ranks
takes as long as some of these trainings.
"""

from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch
from torch import nn

from notebook_accel import GradScalerKwargs
from tests.training import meshes
from tests.training.harness import run_ranks, skip_unless_it_runs
from tests.training.meshes import FLOAT_ERROR, WIDTH, WORDS, Block

# name: ranks, shares of the data, what the user asks for
STRATEGIES = {**meshes.LAYOUTS, **meshes.CONTEXTS, **meshes.MORE}
del STRATEGIES[meshes.BY_RANK]  # what writes files by rank trains as what does not


class WithGain:
    """With a weight of one number, of which most ranks of FSDP have no part."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return super().forward(tokens) * self.gain


class Small(WithGain, meshes.Tiny):
    pass


class Large(WithGain, meshes.Deep):
    pass


def gained(kind):
    model = kind()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.05)


SCALED = {"kwargs_handlers": [GradScalerKwargs(init_scale=meshes.SCALE)]}


def by_windows(kind, precision):
    """An uneven end; windows of one batch in the first epoch and of two in the second, whose last
    window is shorter; clipping at the end of each."""
    return {
        "make": partial(gained, kind),
        "precision": precision,
        "samples": 33,
        "batch": 4,
        "windows": (1, 2),
        "clip": 1.0,
        "settings": SCALED,
    }


# By what a rank has: the whole model or its weights in parts, some stages, parts of sequences.
CASES = {}
CASES["whole"] = {
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
    **{precision: by_windows(Small, precision) for precision in meshes.ROUNDING},
}


def chain():
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), Block(), nn.ReLU(inplace=True), Block(), nn.Linear(WIDTH, WORDS)
    )


def in_groups(kind, optimizer="adamw"):
    model = kind()
    weights = list(model.parameters())
    # Groups across stages, in another order than the model's.
    groups = [{"params": weights[:3:-1], "lr": 2e-2}, {"params": weights[:4]}]
    if optimizer == "sgd":
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return model, torch.optim.AdamW(groups, lr=1e-2)


def evaluate(model):
    """What a trained model gives, and how much of it is here."""
    device = next(model.parameters()).device
    outputs = model.eval()(meshes.data(5).tensors[0].to(device)).tolist()
    return {"outputs": outputs, "parameters": sum(each.numel() for each in model.parameters())}


DECODER = {"make": partial(in_groups, meshes.Deep), "whole": True, "batch": 4, "look": evaluate}
SEQUENTIAL = {**DECODER, "make": partial(in_groups, chain)}
CASES["stages"] = {
    "decoder": DECODER,
    "sequential, uneven end": {
        **SEQUENTIAL,
        "make": partial(in_groups, chain, "sgd"),
        "samples": 13,
    },
    "accumulation, clipping a window": {**DECODER, "accumulate": 2, "clip": 0.05},
    "clipping the largest and by value": {
        **SEQUENTIAL,
        "clip": 0.005,
        "norm": "inf",
        "clip_value": 0.003,
    },
    "gradients exchanged at every batch": {**DECODER, "accumulate": 2, "each": True, "samples": 10},
    **{precision: {**by_windows(Large, precision), "whole": True} for precision in meshes.ROUNDING},
}


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


def attending(causal=True, eps=1e-8):
    model = meshes.Tiny()
    model.blocks = nn.ModuleList([Layer(causal), Layer(causal)])
    model.scale.fill_(0.25)  # losses of order 1
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)


@contextmanager
def divided(accelerator, inputs, targets):
    whole = inputs.clone(), targets.clone()
    with accelerator.maybe_context_parallel(buffers=[inputs, targets], buffer_seq_dims=[1, 1]):
        assert inputs.shape[1] == targets.shape[1] == meshes.LENGTH // 2
        yield
    assert torch.equal(inputs, whole[0])
    assert torch.equal(targets, whole[1])


def mean_of_parts(accelerator, loss):
    """Of the losses of the ranks that divide a sequence."""
    parts = [torch.empty_like(loss) for _ in range(2)]
    torch.distributed.all_gather(parts, loss, group=accelerator.torch_device_mesh["cp"].get_group())
    return torch.stack(parts).mean()


OF_PARTS = {"make": attending, "around": divided, "joins": mean_of_parts}
# Where a gradient is next to nothing, AdamW would make a step of its rounding error in 16 bits.
ROUGH = {**OF_PARTS, "make": partial(attending, eps=0.05), "settings": SCALED}
CASES["parts"] = {
    "causal": OF_PARTS,
    "both ways, accumulation, clipping": {
        **OF_PARTS,
        "make": partial(attending, causal=False),
        "accumulate": 2,
        "clip": 0.05,
    },
    "uneven end, whole calls": {**OF_PARTS, "samples": 7, "whole": True},
    "bf16": {**ROUGH, "precision": "bf16"},
    "fp16, accumulation, clipping": {**ROUGH, "precision": "fp16", "accumulate": 2, "clip": 0.05},
}
# Its plugin has the precision, not the Accelerator.
BY_POLICY = {"bf16": {**CASES["whole"]["bf16"], "settings": {"mixed_precision": "no"}}}


def kind_of(strategy):
    if strategy in meshes.CONTEXTS:
        return "parts"
    return "stages" if "1F1B" in str(strategy) or strategy == "GPipe" else "whole"


def cases_of(strategy):
    return BY_POLICY if strategy == meshes.OWN_POLICY else CASES[kind_of(strategy)]


def train_all(strategies, names=(), **settings):
    """What each case comes to, of those with these names or all; settings are the Accelerator's."""
    return {
        strategy: {
            name: meshes.train(
                strategy, {**case, "settings": {**case.get("settings", {}), **settings}}
            )
            for name, case in cases_of(strategy).items()
            if not names or name in names
        }
        for strategy in strategies
    }


def is_long(strategy, name):
    """Of four ranks, only whole models in full precision are tested by ``make test``."""
    is_quick = kind_of(strategy) == "whole" and name not in meshes.ROUNDING
    return STRATEGIES[strategy][0] == 4 and not is_quick


@cache
def trained(ranks, kind, are_long):
    """What each rank saw, of all strategies of a kind that take so many."""
    strategies = [
        name for name, row in STRATEGIES.items() if row[0] == ranks and kind_of(name) == kind
    ]
    names = [
        name for each in strategies for name in cases_of(each) if is_long(each, name) == are_long
    ]
    return run_ranks(train_all, ranks, strategies, names, timeout=240)


@cache
def twin(strategy, name, precision):
    case = {**cases_of(strategy)[name], "precision": precision}
    return meshes.twin(STRATEGIES[strategy][1], case)


def check(strategy, name, ours, float_error=FLOAT_ERROR):
    """Compare what one rank saw with the twin.

    Args:
        float_error: how far float32 may be off after a step.
    """
    case = cases_of(strategy)[name]
    precision = case.get("precision", "no")
    expected = twin(strategy, name, precision)
    meshes.check_run(ours, expected, case, float_error)
    if precision != "no":
        exact = twin(strategy, name, "no")
        assert ours["losses"] != pytest.approx(exact["losses"], abs=1e-5)
    if "outputs" in ours:
        meshes.check_weights({"": ours["outputs"]}, {"": expected["outputs"]}, 16 * float_error)
        assert ours["parameters"] < expected["parameters"], "each rank has a part of the model"


# On a busy machine four ranks share less than one core: the deadline is that of ``run_ranks``.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param(strategy, name, marks=[pytest.mark.long] if is_long(strategy, name) else [])
        for strategy, (ranks, _, _) in STRATEGIES.items()
        if ranks < 8
        for name in cases_of(strategy)
    ],
)
def test_a_strategy_equals_one_process(strategy, name):
    skip_unless_it_runs(strategy)
    ranks, kind = STRATEGIES[strategy][0], kind_of(strategy)
    for of_rank in trained(ranks, kind, is_long(strategy, name)):
        check(strategy, name, of_rank[strategy][name])
