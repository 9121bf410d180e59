"""Which libraries and devices there are, asked without importing a library or using a device."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from importlib import import_module, metadata
from typing import Any

import torch

from notebook_accel.training import environment
from notebook_accel.training.versions import compare_versions, is_torch_version


def _is_installed(module: str, *packages: str, at_least: str = "", below: str = "") -> bool:
    """Whether a library is installed, and in the right version.

    A folder or a file that only has its name can be imported too: wandb and dvclive leave such a
    folder where they ran, and users call theirs ``datasets``. So its package is asked for as well.

    Args:
        module: what is imported.
        *packages: the names under which it may be installed; none: that of the module.
        at_least: the first version that will do.
        below: the first one that will not.
    """
    if importlib.util.find_spec(module) is None:
        return False
    for package in packages or (module,):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        is_new = not at_least or compare_versions(version, ">=", at_least)
        return is_new and (not below or compare_versions(version, "<", below))
    return False


def _has_device(kind: str, check_device: bool = False) -> bool:  # noqa: ARG001
    """Whether torch sees an accelerator of this kind: it looks for one, asked to or not."""
    # Of CUDA torch asks NVML then. Once the driver has answered, no process that is forked from
    # this one can use a device.
    with environment.patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        if not torch.accelerator.is_available():
            return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == kind


def is_bf16_available(ignore_tpu: bool = False) -> bool:  # noqa: ARG001
    """Whether this machine computes in bfloat16."""
    if _has_device("mps"):
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return not _has_device("cuda") or torch.cuda.is_bf16_supported()


def is_fp16_available() -> bool:
    """Whether this machine computes in float16: all do, the host included, but the first Gaudi."""
    return not is_habana_gaudi1()


def is_rocm_available() -> bool:
    """Whether torch was built for AMD's devices and sees one."""
    return torch.version.hip is not None and _has_device("cuda")


def is_rich_available() -> bool:
    """Whether rich is there, and ``ACCELERATE_ENABLE_RICH`` asks for its tracebacks."""
    return environment.read_flag("ENABLE_RICH") and _is_installed("rich")


def is_cuda_available() -> bool:
    """Whether torch sees a CUDA or ROCm device."""
    return _has_device("cuda")


is_xpu_available = partial(_has_device, "xpu")
is_npu_available = partial(_has_device, "npu")
is_mlu_available = partial(_has_device, "mlu")
is_musa_available = partial(_has_device, "musa")
is_sdaa_available = partial(_has_device, "sdaa")
is_neuron_available = partial(_has_device, "neuron")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether torch sees a Gaudi; with ``init_hccl`` its backend for process groups is loaded."""
    found = _has_device("hpu")
    if found and init_hccl:
        import_module("habana_frameworks.torch.distributed.hccl")
    return found


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether torch, of this version at least, sees Apple's device."""
    return is_torch_version(">=", min_version) and _has_device("mps")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is there, of this version at least."""
    return _is_installed("bitsandbytes", at_least=min_version or "")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes runs on more than CUDA: so since 0.46, and in its older preview."""
    if is_bnb_available("0.46"):
        return True
    features = getattr(sys.modules.get("bitsandbytes"), "features", ())
    return "multi_backend" in features


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is there, and computes on a TPU or a GPU where that is asked.

    ``USE_TORCH_XLA=0`` says that it is not to be used.
    """
    if not (environment.parse_flag_from_env("USE_TORCH_XLA", True) and _is_installed("torch_xla")):
        return False
    wanted = {"TPU"} if check_is_tpu else {"GPU", "CUDA"} if check_is_gpu else None
    return wanted is None or import_module("torch_xla.runtime").device_type() in wanted


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether torchdata is there with its ``StatefulDataLoader`` (0.8)."""
    return _is_installed("torchdata", at_least="0.8.0")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is there, of this version at least."""
    return _is_installed("numpy", at_least=min_version)


def is_torch_distributed_available() -> bool:
    """Whether torch was built with process groups."""
    return torch.distributed.is_available()


def is_fp8_available() -> bool:
    """Whether a library that computes in 8 bits is there."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_megatron_lm_available() -> bool:
    """Whether Megatron-LM is there (its core, of 0.8 at least), and ``ACCELERATE_USE_MEGATRON_LM``
    asks for it."""
    if not environment.read_flag("USE_MEGATRON_LM"):
        return False
    is_there = _is_installed("megatron", "megatron-core", at_least="0.8.0")
    return is_there and importlib.util.find_spec("megatron.training") is not None


def is_tensorboard_available() -> bool:
    """Whether something that writes TensorBoard's files is there."""
    return _is_installed("tensorboard") or _is_installed("tensorboardX")


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine is there and this device has its block-scaled 8-bit numbers."""
    if not _is_installed("transformer_engine"):
        return False
    return bool(import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def is_habana_gaudi1() -> bool:
    """Whether the device is the first Gaudi."""
    if not _has_device("hpu"):
        return False
    experimental = import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


def is_weights_only_available() -> bool:
    """Whether torch loads files without trusting them: every torch that this package takes."""
    return True


def is_xccl_available() -> bool:
    """Whether torch has Intel's backend for process groups."""
    distributed: Any = torch.distributed
    return bool(getattr(distributed, "is_xccl_available", lambda: False)())


is_aim_available = partial(_is_installed, "aim", below="4.0.0")
is_4bit_bnb_available = partial(_is_installed, "bitsandbytes", at_least="0.39.0")
is_8bit_bnb_available = partial(_is_installed, "bitsandbytes", at_least="0.37.2")
is_amdsmi_available = partial(_is_installed, "amdsmi")
is_boto3_available = partial(_is_installed, "boto3")
is_clearml_available = partial(_is_installed, "clearml")
is_comet_ml_available = partial(_is_installed, "comet_ml")
is_datasets_available = partial(_is_installed, "datasets")
is_deepspeed_available = partial(_is_installed, "deepspeed")
is_dvclive_available = partial(_is_installed, "dvclive")
is_import_timer_available = partial(_is_installed, "import_timer")
is_lomo_available = partial(_is_installed, "lomo_optim")
is_matplotlib_available = partial(_is_installed, "matplotlib")
is_mlflow_available = partial(_is_installed, "mlflow", "mlflow", "mlflow-skinny")
is_msamp_available = partial(_is_installed, "msamp", "ms-amp")
is_pandas_available = partial(_is_installed, "pandas")
is_peft_available = partial(_is_installed, "peft")
# It is part of torch (pipelining).
is_pippy_available = partial(is_torch_version, ">=", "2.4.0")
is_pynvml_available = partial(_is_installed, "pynvml", "pynvml", "nvidia-ml-py")
is_pytest_available = partial(_is_installed, "pytest")
is_sagemaker_available = partial(_is_installed, "sagemaker")
is_schedulefree_available = partial(_is_installed, "schedulefree")
is_swanlab_available = partial(_is_installed, "swanlab")
is_timm_available = partial(_is_installed, "timm")
is_tqdm_available = partial(_is_installed, "tqdm")
is_torchao_available = partial(_is_installed, "torchao", at_least="0.6.1")
is_torchdata_available = partial(_is_installed, "torchdata")
is_torchvision_available = partial(_is_installed, "torchvision")
is_trackio_available = partial(_is_installed, "trackio")
is_transformer_engine_available = partial(_is_installed, "transformer_engine")
is_transformers_available = partial(_is_installed, "transformers")
is_triton_available = partial(_is_installed, "triton")
is_wandb_available = partial(_is_installed, "wandb")

__all__ = [
    "is_numpy_available",
    "is_torch_distributed_available",
    "is_tqdm_available",
    "is_xccl_available",
    "is_weights_only_available",
    "is_transformer_engine_mxfp8_available",
    "is_torchdata_stateful_dataloader_available",
    "is_import_timer_available",
    "is_habana_gaudi1",
    "is_fp8_available",
    "is_bitsandbytes_multi_backend_available",
    "is_amdsmi_available",
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_aim_available",
    "is_bf16_available",
    "is_bnb_available",
    "is_boto3_available",
    "is_clearml_available",
    "is_comet_ml_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_dvclive_available",
    "is_fp16_available",
    "is_hpu_available",
    "is_lomo_available",
    "is_matplotlib_available",
    "is_megatron_lm_available",
    "is_mlflow_available",
    "is_mlu_available",
    "is_mps_available",
    "is_msamp_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_pandas_available",
    "is_peft_available",
    "is_pippy_available",
    "is_pynvml_available",
    "is_pytest_available",
    "is_rich_available",
    "is_rocm_available",
    "is_sagemaker_available",
    "is_schedulefree_available",
    "is_sdaa_available",
    "is_swanlab_available",
    "is_tensorboard_available",
    "is_timm_available",
    "is_torch_xla_available",
    "is_torchao_available",
    "is_torchdata_available",
    "is_torchvision_available",
    "is_trackio_available",
    "is_transformer_engine_available",
    "is_transformers_available",
    "is_triton_available",
    "is_wandb_available",
    "is_xpu_available",
]
