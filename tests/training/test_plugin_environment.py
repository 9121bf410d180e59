"""Plugins read the environment as Accelerate's do: the same field from the same variables.

Not compared, since they differ on purpose: FSDP_BACKWARD_PREFETCH (without effect here),
FSDP_SYNC_MODULE_STATES where it is true (the default here; Accelerate's then wants a device),
ACCELERATE_GRADIENT_ACCUMULATION_STEPS (the Accelerator's here, whose argument goes before),
ACCELERATE_FP8_BACKEND=MSAMP and PARALLELISM_CONFIG_SP_* (not there), and
ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES (read here as the plugin is made). ACCELERATE_DYNAMO_* are
compared in ``test_compiling``.
"""

from __future__ import annotations

from typing import Any

import accelerate.utils as peer
import pytest
from torch.distributed.fsdp import wrap

from notebook_accel import utils
from tests.training.single import fresh_rank  # noqa: F401

_FSDP: list[tuple[str, dict[str, str]]] = [
    ("fsdp_version", {}),
    ("fsdp_version", {"VERSION": "2"}),
    ("sharding_strategy", {}),
    *(
        ("sharding_strategy", {"SHARDING_STRATEGY": text})
        for text in ("FULL_SHARD", "shard_grad_op", "NO_SHARD", "HYBRID_SHARD_ZERO2", "4")
    ),
    ("reshard_after_forward", {"VERSION": "2"}),
    ("reshard_after_forward", {"VERSION": "2", "RESHARD_AFTER_FORWARD": "false"}),
    ("reshard_after_forward", {"VERSION": "2", "RESHARD_AFTER_FORWARD": "True"}),
    ("auto_wrap_policy", {}),
    ("auto_wrap_policy", {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}),
    ("auto_wrap_policy", {"AUTO_WRAP_POLICY": "size_based_wrap"}),
    (
        "transformer_cls_names_to_wrap",
        {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": "A,B"},
    ),
    ("min_num_params", {"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}),
    ("min_num_params", {"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "MIN_NUM_PARAMS": "100000000"}),
    ("cpu_offload", {}),
    ("cpu_offload", {"OFFLOAD_PARAMS": "true"}),
    ("cpu_offload", {"OFFLOAD_PARAMS": "yes", "VERSION": "2"}),
    ("state_dict_type", {}),
    ("state_dict_type", {"VERSION": "2"}),
    ("state_dict_type", {"STATE_DICT_TYPE": "sharded_state_dict"}),
    ("state_dict_type", {"STATE_DICT_TYPE": "FULL_STATE_DICT", "VERSION": "2"}),
    ("sync_module_states", {"SYNC_MODULE_STATES": "false"}),
    ("forward_prefetch", {"FORWARD_PREFETCH": "true"}),
    ("use_orig_params", {}),
    ("use_orig_params", {"USE_ORIG_PARAMS": "1"}),
    ("cpu_ram_efficient_loading", {"CPU_RAM_EFFICIENT_LOADING": "true", "VERSION": "2"}),
    ("activation_checkpointing", {}),
    ("activation_checkpointing", {"ACTIVATION_CHECKPOINTING": "true"}),
    (
        "activation_checkpointing_offload",
        {
            "ACTIVATION_CHECKPOINTING": "true",
            "ACTIVATION_CHECKPOINTING_OFFLOAD": "true",
            "VERSION": "2",
        },
    ),
    ("ignored_modules", {"IGNORED_MODULES": "layers.*"}),
]
_NVME = "DEEPSPEED_OFFLOAD_OPTIMIZER_"
_DEEPSPEED: list[tuple[str, dict[str, str]]] = [
    ("zero_stage", {}),
    ("zero_stage", {"DEEPSPEED_ZERO_STAGE": "3"}),
    ("gradient_clipping", {}),
    ("gradient_clipping", {"GRADIENT_CLIPPING": "0.5"}),
    ("gradient_clipping", {"GRADIENT_CLIPPING": "auto"}),
    ("offload_optimizer_device", {}),
    ("offload_optimizer_device", {f"{_NVME}DEVICE": "cpu"}),
    ("offload_optimizer_nvme_path", {f"{_NVME}DEVICE": "nvme", f"{_NVME}NVME_PATH": "/fast"}),
    (
        "offload_param_device",
        {"DEEPSPEED_ZERO_STAGE": "3", "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"},
    ),
    (
        "offload_param_nvme_path",
        {
            "DEEPSPEED_ZERO_STAGE": "3",
            "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
            "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/fast",
        },
    ),
    ("zero3_init_flag", {}),
    ("zero3_init_flag", {"DEEPSPEED_ZERO_STAGE": "3"}),
    ("zero3_init_flag", {"DEEPSPEED_ZERO_STAGE": "3", "DEEPSPEED_ZERO3_INIT": "false"}),
    ("zero3_save_16bit_model", {}),
    ("zero3_save_16bit_model", {"DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}),
]
_SIZES = [(f"{name}_size", f"{name.upper()}_SIZE") for name in ("dp_shard", "tp", "cp")]
_PARALLELISM: list[tuple[str, dict[str, str]]] = [
    *((field, {}) for field, _ in _SIZES),
    *((field, {variable: "2"}) for field, variable in _SIZES),
    ("dp_replicate_size", {"DP_REPLICATE_SIZE": "3"}),
    ("total_size", {"DP_REPLICATE_SIZE": "2", "DP_SHARD_SIZE": "2", "TP_SIZE": "2"}),
    ("cp_handler", {"CP_SIZE": "2"}),
    ("cp_handler", {"CP_SIZE": "2", "CP_COMM_STRATEGY": "alltoall"}),
]
_CASES = [
    *(("FullyShardedDataParallelPlugin", "FSDP_", *case) for case in _FSDP),
    *(("DeepSpeedPlugin", "ACCELERATE_", *case) for case in _DEEPSPEED),
    *(("ParallelismConfig", "PARALLELISM_CONFIG_", *case) for case in _PARALLELISM),
]
_WRAPS = {
    wrap.transformer_auto_wrap_policy: "transformer_based_wrap",
    wrap.size_based_auto_wrap_policy: "size_based_wrap",
    None: "no_wrap",
}


def in_our_words(field: str, value: Any) -> Any:
    """A field of Accelerate's plugin as ours spells it."""
    if field == "auto_wrap_policy":
        return _WRAPS[value]
    return getattr(value, "cp_comm_strategy", value)


@pytest.mark.parametrize(("plugin", "prefix", "field", "variables"), _CASES)
def test_fields_from_the_environment(
    plugin: str,
    prefix: str,
    field: str,
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(prefix + name, text)
    ours = getattr(getattr(utils, plugin)(), field)
    theirs = getattr(getattr(peer, plugin)(), field)
    assert getattr(ours, "cp_comm_strategy", ours) == in_our_words(field, theirs)
