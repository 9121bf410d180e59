"""Every strategy x precision x accumulation equals one process: losses, norms, weights, samples.

The twin is plain torch: one process, batches of all shares together, autocast and a loss scaler of
torch. The loop is the same under every strategy, and does at once what users do: two models, one
by SGD and one by AdamW, each with embedding and head tied, a weight of one number (of which most
ranks of FSDP have no part) and an optimizer made before ``prepare``; data that does not divide
evenly; windows of one batch in the first epoch and of two in the second, whose last window is
shorter; clipping by norm at the end of each; samples gathered for a metric.

All strategies of one number of ranks train one after the other in the same ranks: to start ranks
takes as long as two of these trainings.

Tolerances. In float32 the same products are added up in another order: some 1e-6 a step (see
``meshes``). In bf16 and fp16 each product is rounded, relatively by 2**-8 or 2**-11, and in other
places than the twin's: ranks round the gradients of their own shares, stages those of their
micro-batches, ``fully_shard`` the weights themselves. So a loss of order 1 may move by a few
roundings, and a weight by as much of the path that it went: steps times the learning rate, since
gradients are clipped to norm 1 and SGD has no memory here. AdamW divides by the root of a mean
square, which would make a step of a rounding error where a gradient is next to nothing; added to
that root is ``SMALLEST``, so that an error of a gradient moves a weight by no more than twice
``lr / SMALLEST`` of it, which is the rate of SGD.
"""

from functools import cache, partial
from itertools import chain

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, GradScalerKwargs, ParallelismConfig
from tests.training import meshes
from tests.training.harness import run_ranks, runs_here, skip_unless_it_runs, with_long_ones
from tests.training.meshes import (
    FLOAT_ERROR,
    MESHES,
    SCALE,
    Block,
    Tiny,
    blocks,
    check_weights,
    data,
    loss_of,
    plugin,
)

ROUNDING = {"no": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
WINDOWS = (1, 2)  # batches a step, by epoch
BATCH, RATE, SMALLEST = 4, 0.2, 0.05


class Small(Tiny):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return super().forward(tokens) * self.gain


class Deep(Small):
    """Enough blocks for two stages a rank."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block(), Block()])


MODELS = {"Interleaved1F1B": Deep}
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def asked_for(plugin_fields=None, **sizes):
    """What the user asks for; two micro-batches, of which the last batch fills one."""
    micro = {"num_microbatches": 2} if "pp_size" in sizes else {}
    config = ParallelismConfig(**sizes, **micro, tp_plan=PLAN)
    sharded = {} if plugin_fields is None else {"fsdp_plugin": plugin(**plugin_fields)}
    return {"parallelism_config": config, **sharded}


def gathered_in_bf16():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    return {"fsdp_plugin": blocks(mixed_precision_policy=policy)}


OWN_POLICY = "fsdp, gathered in bf16"
# name: ranks, shares of the data, what the user asks for (made on the rank)
STRATEGIES = {
    "single": (1, 1, dict),
    "replicas": (2, 2, dict),
    **{name: MESHES[name] for name in ("fsdp, blocks", "fsdp, kept whole, on the host")},
    **{name: MESHES[name] for name in ("fsdp, forward twice", "tensor")},
    OWN_POLICY: (2, 2, gathered_in_bf16),
    **{
        schedule: (2, 1, partial(asked_for, pp_size=2, pp_schedule=schedule))
        for schedule in ("1F1B", "GPipe", "Interleaved1F1B")
    },
    "fsdp, parts of unequal size": (3, 3, MESHES["fsdp, blocks"][2]),
    **{name: MESHES[name] for name in ("fsdp x tensor", "replicas x fsdp", "replicas x tensor")},
    "pipeline x replicas": (4, 2, partial(asked_for, pp_size=2, dp_replicate_size=2)),
    "pipeline x fsdp": (4, 2, partial(asked_for, pp_size=2, dp_shard_size=2)),
    "pipeline x tensor": (4, 1, partial(asked_for, pp_size=2, tp_size=2)),
    # By ``make test-eight``.
    "pipeline x fsdp x tensor": (8, 2, partial(asked_for, pp_size=2, dp_shard_size=2, tp_size=2)),
    "pipeline x replicas x fsdp": (
        8,
        4,
        partial(asked_for, pp_size=2, dp_replicate_size=2, dp_shard_size=2),
    ),
    "replicas x fsdp x tensor": (
        8,
        4,
        partial(asked_for, {}, dp_replicate_size=2, dp_shard_size=2, tp_size=2),
    ),
}


def precisions_of(strategy):
    """What the Accelerator is asked for, and in what the model then computes."""
    return {"no": "bf16"} if strategy == OWN_POLICY else {name: name for name in ROUNDING}


def samples_for(shares):
    """For three batches a rank, the last of which is of one sample."""
    return 2 * BATCH * shares + 1


def make(kind):
    torch.manual_seed(3)
    one, other = kind(), kind()
    adam = {"lr": RATE * SMALLEST / 2, "eps": SMALLEST}
    return [
        (one, torch.optim.SGD(one.parameters(), lr=RATE)),
        (other, torch.optim.AdamW(other.parameters(), **adam)),
    ]


def train(strategy, precision, *, cpu=True):
    _, shares, asked = STRATEGIES[strategy]
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=precision,
        kwargs_handlers=[GradScalerKwargs(init_scale=SCALE)],
        **asked(),
    )
    (one, first), (other, second) = make(MODELS.get(strategy, Small))
    loader = DataLoader(data(samples_for(shares)), batch_size=BATCH)
    one, loader, other, first, second = accelerator.prepare(one, loader, other, first, second)
    seen = {"losses": [], "norms": [], "samples": []}
    for window in WINDOWS:
        accelerator.gradient_accumulation_steps = window
        for inputs, targets in loader:
            with accelerator.accumulate(one, other):
                for model, wanted, optimizer in ((one, targets, first), (other, inputs, second)):
                    loss = accelerator.forward_backward(model, inputs, wanted, loss_of)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                        seen["norms"].append(float(norm))
                    optimizer.step()
                    optimizer.zero_grad()
                    seen["losses"].append(float(accelerator.reduce(loss, "mean")))
            seen["samples"] += accelerator.gather_for_metrics(inputs).tolist()
    return {**seen, "weights": [whole(accelerator, one), whole(accelerator, other)]}


def whole(accelerator, model):
    return {key: value.tolist() for key, value in accelerator.get_state_dict(model).items()}


@cache
def twin(kind, shares, precision):
    inputs, targets = data(samples_for(shares)).tensors
    case = {"batch": BATCH, "windows": WINDOWS, "clip": 1.0, "precision": precision}
    both = [
        meshes.twin(
            shares,
            {**case, "make": lambda which=which: make(kind)[which], "data": (inputs, wanted)},
        )
        for which, wanted in enumerate((targets, inputs))
    ]
    by_turns = {
        name: list(chain(*zip(*(one[name] for one in both), strict=True)))
        for name in ("losses", "norms")
    }
    return {**by_turns, "weights": [one["weights"] for one in both]}


def train_all(strategies):
    return {
        strategy: {precision: train(strategy, precision) for precision in precisions_of(strategy)}
        for strategy in strategies
    }


@cache
def trained(ranks):
    """What each rank saw, of all strategies that take so many."""
    strategies = [
        name for name, (needed, _, _) in STRATEGIES.items() if needed == ranks and runs_here(name)
    ]
    return run_ranks(train_all, ranks, strategies, timeout=240)


def check(strategy, precision, ours, float_error):
    """Compare what one rank saw with the twin.

    Args:
        float_error: how far float32 may be off after a step.
    """
    _, shares, _ = STRATEGIES[strategy]
    kind, computes_in = MODELS.get(strategy, Small), precisions_of(strategy)[precision]
    expected, rounding = twin(kind, shares, computes_in), ROUNDING[computes_in]
    steps, what = len(expected["norms"]), (strategy, precision)
    near = float_error * steps + 8 * rounding
    assert ours["losses"] == pytest.approx(expected["losses"], abs=near), what
    if rounding:
        exact = twin(kind, shares, "no")["losses"]
        assert ours["losses"] != pytest.approx(exact, abs=1e-5), what
    of_norms = 10 * float_error + 16 * rounding
    assert ours["norms"] == pytest.approx(expected["norms"], rel=of_norms), what
    samples = data(samples_for(shares)).tensors[0].tolist()
    assert sorted(ours["samples"]) == sorted(len(WINDOWS) * samples), what
    moved = float_error * steps + rounding * RATE * steps
    for mine, theirs in zip(ours["weights"], expected["weights"], strict=True):
        assert mine["head.weight"] == mine["embed.weight"], what
        check_weights(mine, theirs, moved)


# On a busy machine four ranks share less than one core: the deadline is that of ``run_ranks``.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy", with_long_ones({name: row[0] for name, row in STRATEGIES.items() if row[0] < 8})
)
def test_a_strategy_equals_one_process(strategy):
    skip_unless_it_runs(strategy)
    for of_rank in trained(STRATEGIES[strategy][0]):
        for precision, ours in of_rank[strategy].items():
            check(strategy, precision, ours, FLOAT_ERROR)
