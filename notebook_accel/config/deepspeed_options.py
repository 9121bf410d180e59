"""The fields of ``DeepSpeedPlugin``, as settings with checks and environment variables.

A field that is None takes its value from DeepSpeed's configuration, else from its environment
variable, else from its default. This file imports neither torch nor DeepSpeed, since it is imported
in the notebook's kernel, which must not load them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from notebook_accel.config.checks import as_count
from notebook_accel.config.setting import setting

_ZERO = "zero_optimization."
_DEVICES = ("none", "cpu", "nvme")


def _option(stem: str, about: str, **row: Any) -> Any:
    """Return a field whose ``NOTEBOOK_ACCEL_<stem>`` wins over ``ACCELERATE_<stem>``."""
    variables = {"variable": f"ACCELERATE_{stem}", "own": f"NOTEBOOK_ACCEL_{stem}"}
    return setting(about=about, **variables, **row)


@dataclass
class DeepSpeedOptions:
    """Base class of ``DeepSpeedPlugin`` that declares its fields.

    The fields made by ``_option`` can also be set as ``LaunchConfig(deepspeed={...})``.
    """

    hf_ds_config: Any = _option(
        "DEEPSPEED_CONFIG_FILE",
        "DeepSpeed's configuration file; what it leaves open is taken from the other options. In "
        "code also a dictionary",
        yaml="deepspeed_config_file",
    )
    gradient_accumulation_steps: Any = _option(
        # The Accelerator reads this variable, and its argument goes before it.
        "GRADIENT_ACCUMULATION_STEPS",
        "Batches whose gradients are added up for each step",
        kind=int,
        unset="the Accelerator's",
        entry="gradient_accumulation_steps",
    )
    gradient_clipping: Any = _option(
        "GRADIENT_CLIPPING",
        "Largest norm of the gradients",
        kind=float,
        unset="by ``clip_grad_norm_`` alone",
        entry="gradient_clipping",
        fallback="auto",
    )
    zero_stage: int | None = _option(
        "DEEPSPEED_ZERO_STAGE",
        "Divided among the ranks: 1 optimizer states, 2 gradients too, 3 weights too",
        check=partial(as_count, most=3),
        entry=_ZERO + "stage",
        fallback=2,
    )
    is_train_batch_min: bool = True
    """Of several loaders with different batch sizes, whether the smallest or the largest counts."""
    offload_optimizer_device: str | None = _option(
        "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "Where optimizer states are kept",
        choices=_DEVICES,
        entry=_ZERO + "offload_optimizer.device",
        fallback="none",
    )
    offload_param_device: str | None = _option(
        "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        "Where weights are kept, in stage 3",
        choices=_DEVICES,
        entry=_ZERO + "offload_param.device",
        fallback="none",
    )
    offload_optimizer_nvme_path: str | None = _option(
        "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
        "Folder for optimizer states on nvme",
        entry=_ZERO + "offload_optimizer.nvme_path",
    )
    offload_param_nvme_path: str | None = _option(
        "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
        "Folder for weights on nvme",
        entry=_ZERO + "offload_param.nvme_path",
    )
    zero3_init_flag: bool | None = _option(
        "DEEPSPEED_ZERO3_INIT",
        "``from_pretrained`` of Transformers divides weights as it reads them, in stage 3",
        unset="True in stage 3",
    )
    zero3_save_16bit_model: bool | None = _option(
        "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        "Let DeepSpeed's own save_16bit_model gather the weights, in stage 3",
        entry=_ZERO + "stage3_gather_16bit_weights_on_model_save",
        fallback=False,
    )
    transformer_moe_cls_names: str | None = _option(
        "DEEPSPEED_MOE_LAYER_CLS_NAMES",
        "Classes of the layers of experts, which stage 3 gathers whole, with commas",
        yaml="deepspeed_moe_layer_cls_names",
    )
    enable_msamp: bool | None = None
    """True is refused: MS-AMP is not there."""
    msamp_opt_level: str | None = None
    """Accepted."""
