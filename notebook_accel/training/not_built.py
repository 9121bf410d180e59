"""Settings for libraries that are not used here.

They are made and read as Accelerate's are, with its fields and variables, so that a script which
makes some in case it needs them runs. What would train by them refuses them: ``Accelerator`` (its
``megatron_lm_plugin`` and ``kwargs_handlers``), and ``ParallelismConfig`` with an ``sp_size``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from notebook_accel.errors import ConfigError
from notebook_accel.text_values import value_of
from notebook_accel.training.availability import is_msamp_available
from notebook_accel.training.environment import parse_flag_from_env
from notebook_accel.training.settings import KwargsHandler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "DeepSpeedSequenceParallelConfig",
    "FP8RecipeKwargs",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "OtherFP8",
    "TERecipeKwargs",
]


def _fill(settings: Any, prefix: str, defaults: Mapping[str, Any]) -> None:
    """Take fields that were left open from the environment, else their defaults.

    Args:
        settings: is changed.
        prefix: of the variables, whose names end in those of the fields.
        defaults: by field; a type in place of a default stands for None.

    Raises:
        ConfigError: a variable means no value of the default's type.
    """
    for name, default in defaults.items():
        if getattr(settings, name) is not None:
            continue
        variable = f"{prefix}{name.upper()}"
        text = os.environ.get(variable, "").strip()
        kind = default if isinstance(default, type) else type(default)
        value = value_of(text, kind) if text else default
        if text and not isinstance(value, kind):
            raise ConfigError(f"{variable}={text!r}: expected a value of type {kind.__name__}")
        setattr(settings, name, None if value is kind else value)


def _choose(settings: Any, name: str, choices: Sequence[str]) -> None:
    """Set a field to the choice that it names, in capitals or not.

    Raises:
        ConfigError: it is none of them.
    """
    given = getattr(settings, name)
    found = [choice for choice in choices if choice.lower() == str(given).lower()]
    if not found:
        raise ConfigError(
            f"{type(settings).__name__}({name}={given!r}): expected one of {', '.join(choices)}"
        )
    setattr(settings, name, found[0])


@dataclass
class OtherFP8(KwargsHandler):
    """Settings of 8-bit training by another library than torchao."""

    library: ClassVar[str]


_FP8 = "ACCELERATE_FP8_"


@dataclass
class TERecipeKwargs(OtherFP8):
    """The settings of NVIDIA's Transformer Engine in Accelerate, which is not used here.

    Fields that are left open are read from ``ACCELERATE_FP8_*``.

    Raises:
        ConfigError: a field has a value that is not known.
    """

    library = "Transformer Engine"
    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    """"HYBRID", "E4M3" or "E5M2"."""
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    """"most_recent" or "max"."""
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        flags = {"use_autocast_during_eval": False, "use_mxfp8_block_scaling": False}
        numbers = {"margin": 0, "interval": 1, "amax_history_len": 1024}
        _fill(self, _FP8, {**flags, **numbers, "amax_compute_algo": "most_recent"})
        _fill(self, "ACCELERATE_", {"fp8_format": "HYBRID"})
        _choose(self, "fp8_format", ("HYBRID", "E4M3", "E5M2"))
        _choose(self, "amax_compute_algo", ("max", "most_recent"))
        if self.override_linear_precision is None:
            self.override_linear_precision = (
                parse_flag_from_env(f"{_FP8}OVERRIDE_FPROP"),
                parse_flag_from_env(f"{_FP8}OVERRIDE_DGRAD"),
                parse_flag_from_env(f"{_FP8}OVERRIDE_WGRAD"),
            )


@dataclass
class MSAMPRecipeKwargs(OtherFP8):
    """The settings of Microsoft's MS-AMP in Accelerate, which is not used here.

    Raises:
        ConfigError: the level is not known.
    """

    library = "MS-AMP"
    opt_level: str | None = None
    """"O1" or "O2"; None reads ``ACCELERATE_FP8_OPT_LEVEL``."""

    def __post_init__(self) -> None:
        _fill(self, _FP8, {"opt_level": "O2"})
        _choose(self, "opt_level", ("O1", "O2"))


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Accelerate's older name for the settings of Transformer Engine and MS-AMP.

    Raises:
        ConfigError: a field has a value that is not known.
    """

    library = "Transformer Engine or MS-AMP"
    backend: str | None = None
    """"TE" or "MSAMP"; None reads ``ACCELERATE_FP8_BACKEND``."""

    def __post_init__(self) -> None:
        _fill(self, _FP8, {"backend": "MSAMP" if is_msamp_available() else "TE"})
        _choose(self, "backend", ("MSAMP", "TE"))
        TERecipeKwargs.__post_init__(self)
        MSAMPRecipeKwargs.__post_init__(self)


@dataclass
class DeepSpeedSequenceParallelConfig:
    """The settings of DeepSpeed's sequence parallelism in Accelerate, which is not used here.

    Raises:
        ConfigError: a field has a value that is not known, or a length is missing.
    """

    sp_seq_length: int | None = None
    """Length of the sequences, where that is the same in all batches."""
    sp_seq_length_is_variable: bool | None = None
    """Whether it may differ. Variable PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE, else True."""
    sp_attn_implementation: str | None = None
    """Such as "sdpa", or a kernel of the hub. Variable
    PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION."""

    def __post_init__(self) -> None:
        prefix = "PARALLELISM_CONFIG_"
        _fill(self, prefix, {"sp_seq_length_is_variable": True, "sp_attn_implementation": str})
        if not self.sp_seq_length_is_variable:
            _fill(self, prefix, {"sp_seq_length": int})
            if self.sp_seq_length is None:
                raise ConfigError(
                    "DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False) needs "
                    "sp_seq_length, or the variable PARALLELISM_CONFIG_SP_SEQ_LENGTH"
                )
        given = self.sp_attn_implementation
        is_kernel = given is not None and "/" in given and "flash-attn" in given
        if given is not None and not is_kernel:
            known = ("flash_attention_2", "flash_attention_3", "sdpa")
            _choose(self, "sp_attn_implementation", known)


@dataclass
class MegatronLMPlugin:
    """The settings of Megatron-LM in Accelerate. There is no Megatron-LM here.

    The fields are Accelerate's, in its order. Those of the table below that are left open are read
    from ``MEGATRON_LM_*``.

    Raises:
        ConfigError: a variable means no value of its field.
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: bool | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _fill(self, "MEGATRON_LM_", _MEGATRON)


_MEGATRON: Mapping[str, Any] = {
    "tp_degree": 1,
    "pp_degree": 1,
    "use_custom_fsdp": False,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "no_load_optim": False,
    "eod_mask_loss": False,
    "no_save_optim": False,
    "optimizer_cpu_offload": False,
    "use_precision_aware_optimizer": False,
    "decoder_last_pipeline_num_layers": int,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "attention_backend": True,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "expert_tensor_parallel_size": 1,
    "calculate_per_token_loss": True,
    "use_rotary_position_embeddings": True,
    "num_micro_batches": 1,
    "gradient_clipping": 1.0,
    "sequence_parallelism": False,
    "recompute_activations": False,
    "use_distributed_optimizer": False,
}
