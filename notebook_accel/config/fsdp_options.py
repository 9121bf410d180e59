"""The fields of ``FullyShardedDataParallelPlugin``, as settings with checks and variables.

A field that is None takes its value from its environment variable, else from its default. This
file imports no torch, since it is imported in the notebook's kernel; the code that uses the values
in ranks is in training/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from notebook_accel.config.checks import as_count
from notebook_accel.config.setting import setting

if TYPE_CHECKING:
    from torch.nn import Module

# Accelerate's names have no prefix of their own, and so no twin of ours.
_option = partial(setting, own="", prefix="FSDP_")


@dataclass
class FsdpOptions:
    """Base class of ``FullyShardedDataParallelPlugin`` that declares its fields.

    The fields made by ``_option`` can also be set as ``LaunchConfig(fsdp={...})``.
    """

    fsdp_version: int | None = _option(
        check=partial(as_count, most=2),
        variable="FSDP_VERSION",
        about="1 or 2: whose defaults checkpoints have; both train by FSDP2",
        fallback=1,
    )
    sharding_strategy: Any = _option(
        choices=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
        numbers=(1, 2, 3, 4, 5),
        about="What is divided among the ranks, and among which of them: SHARD_GRAD_OP keeps "
        "weights whole between forward and backward; HYBRID_SHARD shards within a machine and "
        "replicates over machines",
        fallback="FULL_SHARD",
    )
    reshard_after_forward: Any = _option(
        kind=bool,
        or_choice_of="sharding_strategy",  # version 1
        about="Drop gathered weights between forward and backward",
        unset="by sharding_strategy",
    )
    backward_prefetch: Any = None
    """Accepted."""
    mixed_precision_policy: Any = None
    """A ``MixedPrecisionPolicy`` or ``MixedPrecision``, or what one is made of: the name of a type,
    or a dict. None follows the Accelerator's ``mixed_precision``."""
    auto_wrap_policy: Any = _option(
        choices=("transformer_based_wrap", "size_based_wrap", "no_wrap"),
        about="How FSDP chooses the modules whose weights it gathers as they run; in code also a "
        "function (module, recurse, nonwrapped_numel) -> bool",
        fallback="no_wrap",
    )
    cpu_offload: Any = _option(
        kind=bool,
        variable="FSDP_OFFLOAD_PARAMS",
        about="Keep the parts in the memory of the CPU",
        fallback=False,
    )
    ignored_modules: Iterable[Module] | str | None = _option(
        about="A regular expression: names of modules whose weights every rank keeps whole; in "
        "code also the modules"
    )
    state_dict_type: Any = _option(
        choices=("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
        numbers=(1, 3),
        about="Whether save_state writes whole weights, or each rank its part; with a full config "
        "in code, whole ones",
        unset="version 1: whole, 2: parts",
    )
    state_dict_config: Any = None
    """Such as ``FullStateDictConfig(offload_to_cpu=True, rank0_only=True)``."""
    optim_state_dict_config: Any = None
    """Such as ``FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)``."""
    limit_all_gathers: bool = True
    """Accepted."""
    use_orig_params: bool | None = False
    """Accepted: parameters always are the user's own."""
    param_init_fn: Callable[[Module], None] | None = None
    """Fills the weights of a module that was made on the meta device."""
    sync_module_states: bool | None = _option(
        about="All ranks start from rank 0's weights", fallback=True
    )
    forward_prefetch: bool | None = False
    """Accepted."""
    activation_checkpointing: bool | None = _option(
        about="Compute activations of the wrapped modules again in backward, for less memory",
        fallback=False,
    )
    activation_checkpointing_offload: bool | None = _option(
        about="Keep what activation checkpointing needs, the inputs of the wrapped modules, in the "
        "memory of the CPU",
        fallback=False,
    )
    cpu_ram_efficient_loading: bool | None = _option(
        about="Rank 0 alone reads the weights", fallback=False
    )
    transformer_cls_names_to_wrap: list[str] | str | None = _option(
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        yaml="fsdp_transformer_layer_cls_to_wrap",
        about="Classes of the modules that transformer_based_wrap chooses, with commas",
        unset="the model's ``_no_split_modules``",
        fallback="",
    )
    min_num_params: int | None = _option(
        check=partial(as_count, least=0),
        about="size_based_wrap: minimum number of parameters of a wrapped module; 0 wraps nothing",
        fallback=0,
    )
