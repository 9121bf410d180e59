"""What a training step costs beyond raw torch, strategy by strategy: a small transformer, 2 ranks.

For each strategy two fresh ranks hold all its contenders and run blocks of steps in turn: torch's
own DistributedDataParallel, ``fully_shard``, ``parallelize_module``, pipeline schedule, or
``context_parallel`` over sharded weights, DeepSpeed's engine where it is installed (``make
test-deepspeed`` gets it: ``build/deepspeed/bin/python benchmarks/strategies.py``), and ours.
Accelerate is beside us with DDP, the one that it has without an accelerator. Quoted are medians
over the turns: CPU time of both ranks together, and the ratio to the raw block of the same turn of
CPU time and of wall time. Other work on the machine spoils wall time first. Our pipeline does more
than the schedule alone: every rank gets the loss.

``--scaling`` asks another question: how many samples a second two ranks with DDP train, over those
of one rank without it, each with one thread. Ranks of one kind and of the other start in turn; the
last column is our gain over torch's in the same turn.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from timing import arguments, in_turn, table
from torch import multiprocessing, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim import Optimizer

    Contenders = dict[str, Callable[[], Callable[[], object]]]
    # What each took, turn by turn: CPU time and wall time of a step.
    Turns = dict[str, list[tuple[float, float]]]

RAW, OURS = "torch", "notebook_accel"
NUM_RANKS = 2
WORDS, WIDTH, HEADS, DEPTH = 512, 128, 4, 2
BATCH, LENGTH = 8, 64
NUM_MICROBATCHES = 4
ATTEND = nn.functional.scaled_dot_product_attention  # before anybody replaces it
# As our plugin fills it in; DeepSpeed's own defaults would clip, and print each tenth step.
ZERO = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 0.0,
    "steps_per_print": float("inf"),
}
TENSOR_PLAN = {
    **{f"*.{name}": "colwise" for name in ("query", "key", "value", "up")},
    **{f"*.{name}": "rowwise" for name in ("out", "down")},
}


class Block(nn.Module):
    """Attention and a feed-forward layer; the number of heads is what the layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_feed = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.before_attention(hidden)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.before_feed(hidden))))


def transformer() -> nn.Sequential:
    """The model, with the same weights for all."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(DEPTH)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, the same for all."""
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_loop(
    model: nn.Module, optimizer: Optimizer, backward: Callable[[Any], object]
) -> Callable[[], object]:
    """One step, as a training loop has it."""
    inputs, targets = batch()

    def step() -> torch.Tensor:
        loss = loss_of(model(inputs), targets)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def raw_loop(model: nn.Module) -> Callable[[], object]:
    return plain_loop(model, adamw(model), torch.Tensor.backward)


def raw_alone() -> Callable[[], object]:
    """One rank, whose gradients go nowhere."""
    return raw_loop(transformer())


def raw_ddp() -> Callable[[], object]:
    return raw_loop(nn.parallel.DistributedDataParallel(transformer()))


def sharded() -> nn.Sequential:
    """The model with ``fully_shard`` on each block and on the whole."""
    from torch.distributed.fsdp import fully_shard

    model = transformer()
    mesh = dist.init_device_mesh("cpu", (NUM_RANKS,))
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def raw_fsdp() -> Callable[[], object]:
    return raw_loop(sharded())


def raw_tensor() -> Callable[[], object]:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {name: styles[style]() for name, style in TENSOR_PLAN.items()}
    mesh = dist.init_device_mesh("cpu", (NUM_RANKS,))
    return raw_loop(parallelize_module(transformer(), mesh, plan))


def raw_pipeline() -> Callable[[], object]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, rank = transformer(), dist.get_rank()
    half = len(model) // NUM_RANKS
    mine = model[:half] if rank == 0 else model[half:]
    stage = PipelineStage(mine, rank, NUM_RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_of)
    optimizer = adamw(mine)
    inputs, targets = batch()

    def step() -> None:
        # What the caller gets of the outputs is not asked for: ours gives the loss alone.
        if rank == 0:
            schedule.step(inputs, return_outputs=False)
        else:
            schedule.step(target=targets, losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


def raw_context() -> Callable[[], object]:
    """Torch divides the sequences; the attention over their parts that it brings, a ring, needs an
    accelerator, so that keys and values are gathered by hand."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd
    from torch.distributed.tensor.experimental import context_parallel

    mesh = dist.init_device_mesh("cpu", (NUM_RANKS,))
    model = sharded()
    optimizer = adamw(model)
    inputs, targets = batch()
    # Each rank gets a piece from the front and one from the back.
    pieces = torch.arange(LENGTH).chunk(2 * NUM_RANKS)
    of_ranks = [torch.cat([pieces[rank], pieces[-1 - rank]]) for rank in range(NUM_RANKS)]
    mask = of_ranks[dist.get_rank()][:, None] >= torch.cat(of_ranks)[None, :]

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool
    ) -> torch.Tensor:
        assert is_causal
        keys, values = (
            all_gather_tensor_autograd(part.contiguous(), 2, mesh) for part in (key, value)
        )
        return ATTEND(query, keys, values, attn_mask=mask)

    def step() -> None:
        with context_parallel(mesh, buffers=[inputs, targets], buffer_seq_dims=[1, 1]):
            ring = nn.functional.scaled_dot_product_attention
            nn.functional.scaled_dot_product_attention = attend
            loss_of(model(inputs), targets).backward()
            nn.functional.scaled_dot_product_attention = ring
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_accelerator(accelerator: Any) -> Callable[[], object]:
    """One step with either Accelerator."""
    model = transformer()
    model, optimizer = accelerator.prepare(model, adamw(model))
    return plain_loop(model, optimizer, accelerator.backward)


def our_accelerator(**settings: Any) -> Any:
    from notebook_accel import Accelerator

    return Accelerator(cpu=True, **settings)


def our_ddp() -> Callable[[], object]:
    return with_accelerator(our_accelerator())


def peer_ddp() -> Callable[[], object]:
    from accelerate import Accelerator

    return with_accelerator(Accelerator(cpu=True))


def sharding() -> Any:
    """What shards the model block by block."""
    from notebook_accel import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )


def our_fsdp() -> Callable[[], object]:
    return with_accelerator(our_accelerator(fsdp_plugin=sharding()))


def our_tensor() -> Callable[[], object]:
    from notebook_accel import ParallelismConfig

    sizes = ParallelismConfig(tp_size=NUM_RANKS, tp_plan=TENSOR_PLAN)
    return with_accelerator(our_accelerator(parallelism_config=sizes))


def our_pipeline() -> Callable[[], object]:
    from notebook_accel import ParallelismConfig

    sizes = ParallelismConfig(pp_size=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    accelerator = our_accelerator(parallelism_config=sizes)
    model = transformer()
    model, optimizer = accelerator.prepare(model, adamw(model))
    inputs, targets = batch()

    def step() -> None:
        accelerator.forward_backward(model, inputs, targets, loss_of)
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_context() -> Callable[[], object]:
    from notebook_accel import ParallelismConfig

    sizes = ParallelismConfig(cp_size=NUM_RANKS)
    accelerator = our_accelerator(fsdp_plugin=sharding(), parallelism_config=sizes)
    model = transformer()
    model, optimizer = accelerator.prepare(model, adamw(model))
    inputs, targets = batch()

    def step() -> None:
        with accelerator.maybe_context_parallel(buffers=[inputs, targets], buffer_seq_dims=[1, 1]):
            accelerator.backward(loss_of(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

    return step


def raw_deepspeed() -> Callable[[], object]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # On a CPU it would compile what its inference exchanges by, as it starts: that takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = transformer()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=ZERO)
    inputs, targets = batch()

    def step() -> None:
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()

    return step


def our_deepspeed() -> Callable[[], object]:
    from notebook_accel import DeepSpeedPlugin

    return with_accelerator(our_accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2)))


DEEPSPEED = "DeepSpeed, ZeRO stage 2"
STRATEGIES: dict[str, Contenders] = {
    "DDP": {RAW: raw_ddp, OURS: our_ddp, "accelerate": peer_ddp},
    "FSDP2": {RAW: raw_fsdp, OURS: our_fsdp},
    "tensor parallelism": {RAW: raw_tensor, OURS: our_tensor},
    "pipeline, 1F1B": {RAW: raw_pipeline, OURS: our_pipeline},
    "context parallelism": {RAW: raw_context, OURS: our_context},
    DEEPSPEED: {RAW: raw_deepspeed, OURS: our_deepspeed},
}
# By the number of ranks; our DDP is a plain model where there is one.
SCALING: dict[int, Contenders] = {
    1: {RAW: raw_alone, OURS: our_ddp},
    NUM_RANKS: {RAW: raw_ddp, OURS: our_ddp},
}


def measure(step: Callable[[], object], count: int) -> tuple[float, float]:
    """CPU time and wall time of one step, of a block that all ranks begin together."""
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        step()
    return (time.process_time() - cpu) / count, (time.perf_counter() - wall) / count


def be_rank(
    rank: int, contenders: Contenders, num_ranks: int, folder: str, repeats: int, count: int
) -> None:
    """What each rank does; rank 0 writes what all of them measured into the folder."""
    sizes = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, **sizes}
    os.environ.update({key: str(value) for key, value in numbers.items()})
    os.environ.update(ACCELERATE_USE_CPU="true", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch, about patterns that no layer of a part fits
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    steps = {contender: make() for contender, make in contenders.items()}
    spent = in_turn(steps, lambda step: measure(step, count), repeats)
    of_ranks: list[Any] = [None] * num_ranks
    dist.all_gather_object(of_ranks, spent)
    if rank == 0:
        Path(folder, "spent").write_text(json.dumps(of_ranks))
    dist.destroy_process_group()


def spend(
    contenders: Contenders, repeats: int, count: int, num_ranks: int = NUM_RANKS
) -> list[Turns]:
    """What contenders take in fresh ranks, one list entry a rank."""
    with tempfile.TemporaryDirectory() as folder:
        given = contenders, num_ranks, folder, repeats, count
        multiprocessing.start_processes(be_rank, given, nprocs=num_ranks, start_method="fork")
        found: list[Turns] = json.loads(Path(folder, "spent").read_text())
    return found


def by_turn(of_ranks: list[Turns], name: str) -> list[tuple[float, float]]:
    """CPU time of all ranks together and wall time of the slowest, turn by turn."""
    turns = zip(*(spent[name] for spent in of_ranks), strict=True)
    return [(sum(cpu for cpu, _ in ranks), max(wall for _, wall in ranks)) for ranks in turns]


def rows(of_ranks: list[Turns]) -> list[dict[str, str]]:
    """The lines of a table, from what each rank measured."""
    cpu, wall = {}, {}
    for name in of_ranks[0]:
        cpu[name], wall[name] = zip(*by_turn(of_ranks, name), strict=True)
    return [
        {
            "": name,
            "CPU ms a step": f"{statistics.median(cpu[name]) * 1e3:.2f}",
            "times torch": f"{ratio(cpu, name):.3f}",
            "wall, times torch": f"{ratio(wall, name):.3f}",
        }
        for name in cpu
    ]


def ratio(spent: Mapping[str, Sequence[float]], name: str) -> float:
    """The median over the turns of what a contender has over what torch has."""
    pairs = zip(spent[name], spent[RAW], strict=True)
    return statistics.median(own / base for own, base in pairs)


def scaling(rounds: int, repeats: int, count: int) -> list[dict[str, str]]:
    """Samples a second of one rank and of two, and what the second one gains."""
    rates: dict[int, dict[str, list[float]]] = {
        num_ranks: {name: [] for name in contenders} for num_ranks, contenders in SCALING.items()
    }
    for _ in range(rounds):
        for num_ranks, contenders in SCALING.items():
            of_ranks = spend(contenders, repeats, count, num_ranks)
            for name in contenders:
                wall = statistics.median(wall for _, wall in by_turn(of_ranks, name))
                rates[num_ranks][name].append(num_ranks * BATCH / wall)
    alone, together = rates[1], rates[NUM_RANKS]
    gains = {
        name: [both / one for one, both in zip(alone[name], together[name], strict=True)]
        for name in alone
    }
    return [
        {
            "": name,
            "1 rank, samples/s": f"{statistics.median(alone[name]):.0f}",
            "2 ranks, samples/s": f"{statistics.median(together[name]):.0f}",
            "gain": f"{statistics.median(gains[name]):.3f}",
            "times torch's": f"{ratio(gains, name):.3f}",
        }
        for name in gains
    ]


def main() -> None:
    parser = arguments(__doc__, repeats=40)
    parser.add_argument("--only", choices=STRATEGIES, help="measure this strategy alone")
    parser.add_argument("--scaling", action="store_true", help="two ranks against one, by DDP")
    options = parser.parse_args()
    repeats, count = (3, 3) if options.quick else (options.repeats, 5)
    if options.scaling:
        rounds = 1 if options.quick else 10
        print(table(scaling(rounds, max(3, repeats // 4), count)))
        return
    for name in [options.only] if options.only else STRATEGIES:
        if name == DEEPSPEED and find_spec("deepspeed") is None:
            print(f"\n{name}: DeepSpeed is not installed")
        else:
            print(f"\n{name}:\n{table(rows(spend(STRATEGIES[name], repeats, count)))}", flush=True)


if __name__ == "__main__":
    main()
