"""What Accelerate has by libraries that are not used here: what code that asks for it is told."""

from __future__ import annotations

from typing import Any

from notebook_accel.errors import ConfigError

__all__ = [
    "DeepSpeedSequenceParallelConfig",
    "FP8RecipeKwargs",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "TERecipeKwargs",
]


class _NotBuilt:
    """Settings for a library that is not used here.

    Raises:
        ConfigError: always.
    """

    library: str
    instead: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        asked = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        raise ConfigError(
            f"{type(self).__name__}({', '.join(asked)}): {self.library} is not supported; "
            f"{self.instead}"
        )


class MegatronLMPlugin(_NotBuilt):
    """The settings of Megatron-LM in Accelerate. There is no Megatron-LM here.

    Raises:
        ConfigError: always.
    """

    library = "Megatron-LM"
    instead = (
        "torch's own tensor and pipeline parallelism is: "
        "Accelerator(parallelism_config=ParallelismConfig(tp_size=..., pp_size=...))"
    )


class _OtherFP8(_NotBuilt):
    instead = (
        'training in 8 bits by torchao is: Accelerator(mixed_precision="fp8", '
        "kwargs_handlers=[AORecipeKwargs(...)])"
    )


class TERecipeKwargs(_OtherFP8):
    """The settings of NVIDIA's Transformer Engine in Accelerate, which is not used here.

    Raises:
        ConfigError: always.
    """

    library = "Transformer Engine"


class MSAMPRecipeKwargs(_OtherFP8):
    """The settings of Microsoft's MS-AMP in Accelerate, which is not used here.

    Raises:
        ConfigError: always.
    """

    library = "MS-AMP"


class FP8RecipeKwargs(_OtherFP8):
    """Accelerate's older name for the settings of Transformer Engine and MS-AMP.

    Raises:
        ConfigError: always.
    """

    library = "training in 8 bits by Transformer Engine or MS-AMP"


class DeepSpeedSequenceParallelConfig(_NotBuilt):
    """The settings of DeepSpeed's sequence parallelism in Accelerate, which is not used here.

    Raises:
        ConfigError: always.
    """

    library = "DeepSpeed's sequence parallelism (ALST, Ulysses)"
    instead = "sequences are divided by ParallelismConfig(cp_size=...)"
