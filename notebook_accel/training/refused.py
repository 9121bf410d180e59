"""Names of Accelerate that drive what is not here: each says what there is, once it is used.

A script imports them at its top, and uses them where it trains by Megatron-LM or in 8 bits by
Transformer Engine, or builds what ``accelerate launch`` would run. One that does not get there
runs. The settings that go with them are in ``not_built``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronEngine",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
    "T5TrainStep",
    "add_model_config_to_megatron_parser",
    "apply_fp8_autowrap",
    "avg_losses_across_data_parallel_group",
    "contextual_fp8_autocast",
    "convert_model",
    "finish_mpu_init",
    "gather_across_data_parallel_groups",
    "initialize",
    "install_xla",
    "model_provider_func",
    "prepare_data_loader",
    "prepare_deepspeed_cmd_env",
    "prepare_extend_env_parallelism_config",
    "prepare_model_optimizer_scheduler",
    "prepare_multi_gpu_env",
    "prepare_optimizer",
    "prepare_sagemager_args_inputs",
    "prepare_scheduler",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
    "setup_fp8_env",
]

_MEGATRON = (
    "there is no Megatron-LM here; torch divides layers and makes pipelines: "
    "parallelism_config=ParallelismConfig(tp_size=..., pp_size=...)"
)
_ENGINE = (
    "there is no Transformer Engine here; torchao computes in 8 bits: mixed_precision='fp8', "
    "kwargs_handlers=[AORecipeKwargs(...)]"
)
_LAUNCH = (
    "there is no `accelerate launch` here, whose commands it builds; notebook_launcher starts "
    "ranks, and torchrun starts those of a script"
)
_XLA = "there is no XLA here; ranks compute on CPUs and on GPUs"


def _refusing(name: str, instead: str) -> Callable[..., Any]:
    """A function of this name that raises, whatever it is called with."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise ConfigError(f"{name}(): {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refused: {instead}."
    return refuse


class _OfMegatron:
    """What can be derived from, and not made."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise ConfigError(f"{type(self).__name__}(): {_MEGATRON}")


class AbstractTrainStep(_OfMegatron):
    """A step of Megatron-LM's training, which is not here; classes of one's own derive from it."""


class BertTrainStep(AbstractTrainStep):
    """That of BERT; Megatron-LM is not here."""


class GPTTrainStep(AbstractTrainStep):
    """That of GPT; Megatron-LM is not here."""


class T5TrainStep(AbstractTrainStep):
    """That of T5; Megatron-LM is not here."""


class MegatronEngine(_OfMegatron):
    """The model in training by Megatron-LM, which is not here."""


class MegatronLMDummyDataLoader(_OfMegatron):
    """What stands for Megatron-LM's own loader, which is not here."""


class MegatronLMDummyScheduler(_OfMegatron):
    """What stands for Megatron-LM's own scheduler, which is not here."""


class MegatronLMOptimizerWrapper(_OfMegatron):
    """An optimizer of Megatron-LM, which is not here."""


class MegatronLMSchedulerWrapper(_OfMegatron):
    """A scheduler of Megatron-LM, which is not here."""


add_model_config_to_megatron_parser = _refusing("add_model_config_to_megatron_parser", _MEGATRON)
avg_losses_across_data_parallel_group = _refusing(
    "avg_losses_across_data_parallel_group", _MEGATRON
)
finish_mpu_init = _refusing("finish_mpu_init", _MEGATRON)
gather_across_data_parallel_groups = _refusing("gather_across_data_parallel_groups", _MEGATRON)
initialize = _refusing("initialize", _MEGATRON)
model_provider_func = _refusing("model_provider_func", _MEGATRON)
prepare_data_loader = _refusing("prepare_data_loader", _MEGATRON)
prepare_model_optimizer_scheduler = _refusing("prepare_model_optimizer_scheduler", _MEGATRON)
prepare_optimizer = _refusing("prepare_optimizer", _MEGATRON)
prepare_scheduler = _refusing("prepare_scheduler", _MEGATRON)

apply_fp8_autowrap = _refusing("apply_fp8_autowrap", _ENGINE)
contextual_fp8_autocast = _refusing("contextual_fp8_autocast", _ENGINE)
convert_model = _refusing("convert_model", _ENGINE)

prepare_deepspeed_cmd_env = _refusing("prepare_deepspeed_cmd_env", _LAUNCH)
prepare_extend_env_parallelism_config = _refusing("prepare_extend_env_parallelism_config", _LAUNCH)
prepare_multi_gpu_env = _refusing("prepare_multi_gpu_env", _LAUNCH)
prepare_sagemager_args_inputs = _refusing("prepare_sagemager_args_inputs", _LAUNCH)
prepare_simple_launcher_cmd_env = _refusing("prepare_simple_launcher_cmd_env", _LAUNCH)
prepare_tpu = _refusing("prepare_tpu", _LAUNCH)
setup_fp8_env = _refusing("setup_fp8_env", _LAUNCH)

install_xla = _refusing("install_xla", _XLA)
