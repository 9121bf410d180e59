"""The blocks of a model, and which of them make a stage of a pipeline."""

from __future__ import annotations

import copy
import operator
from functools import cache
from typing import TYPE_CHECKING

from torch import nn

from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["balance", "count_weights", "find", "list_of", "refuse_shared_weights"]


def count_weights(module: nn.Module) -> int:
    """How many numbers a module's weights have."""
    return sum(weight.numel() for weight in module.parameters())


def find(model: nn.Module, num_stages: int) -> tuple[str, nn.Module]:
    """The module whose children are the blocks, and how their names begin.

    Raises:
        ConfigError: the model has nothing with a block for each stage.
    """
    found = [
        (f"{name}." if name else "", part)
        for name, part in model.named_modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) >= num_stages
    ]
    if not found:
        raise ConfigError(
            f"a pipeline of {num_stages} stages takes one block or more a stage, and "
            f"{type(model).__name__} has no nn.Sequential or nn.ModuleList of {num_stages} or more "
            "blocks: lower pp_size, use dp_shard_size, or write the model as an nn.Sequential"
        )
    if isinstance(model, nn.Sequential) and found[0][1] is model:
        return found[0]
    # Of one list inside another the outer one is named first, and max takes the first.
    return max(found, key=lambda each: count_weights(each[1]))


def list_of(container: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks by name, each a module of its own: one that is used twice (an activation) is in
    two places, which may be in two stages."""
    blocks: list[tuple[str, nn.Module]] = []
    for name, block in container._modules.items():
        assert block is not None
        is_known = any(block is known for _, known in blocks)
        blocks.append((name, copy.copy(block) if is_known else block))
    return blocks


def balance(costs: Sequence[int], num_stages: int) -> list[int]:
    """Where each stage ends, so that the largest stage is as small as can be."""

    @cache
    def divide(start: int, stages: int) -> tuple[int, tuple[int, ...]]:
        if stages == 1:
            return sum(costs[start:]), (len(costs),)
        choices = []
        # From the back: of equal choices the first stages get more, as the last has the head.
        for end in range(len(costs) - stages + 1, start, -1):
            largest, ends = divide(end, stages - 1)
            choices.append((max(sum(costs[start:end]), largest), (end, *ends)))
        return min(choices, key=operator.itemgetter(0))

    return list(divide(0, num_stages)[1])


def refuse_shared_weights(
    prefix: str,
    blocks: Sequence[tuple[str, nn.Module]],
    ranges: Sequence[range],
    outside: Collection[int],
) -> None:
    """Refuse a model that has one weight in the blocks of two stages.

    Args:
        prefix: how the names of blocks begin.
        blocks: by name.
        ranges: the blocks of each stage.
        outside: ids of the weights that are outside of the blocks, too, and so on every rank.

    Raises:
        ConfigError: the stages would train two copies of the weight.
    """
    seen: dict[int, tuple[int, str]] = {}
    for stage, indices in enumerate(ranges):
        for index in indices:
            name, block = blocks[index]
            for inner, weight in block.named_parameters():
                full = f"{prefix}{name}.{inner}"
                first, other = seen.setdefault(id(weight), (stage, full))
                if first != stage and id(weight) not in outside:
                    raise ConfigError(
                        f"{other!r} and {full!r} are one weight, and the pipeline puts them into "
                        f"stages {first} and {stage}: expected blocks without weights in common; "
                        "lower pp_size, or use dp_shard_size"
                    )
