"""Megatron-LM: not built here; what code that asks for it is told."""

from __future__ import annotations

from typing import Any

from notebook_accel.errors import ConfigError

__all__ = ["MegatronLMPlugin"]


class MegatronLMPlugin:
    """The settings of Megatron-LM in Accelerate. There is no Megatron-LM here.

    Raises:
        ConfigError: always.
    """

    def __init__(
        self, tp_degree: int | None = None, pp_degree: int | None = None, **_: Any
    ) -> None:
        raise ConfigError(
            f"MegatronLMPlugin(tp_degree={tp_degree}, pp_degree={pp_degree}): Megatron-LM is not "
            "supported; torch's own tensor and pipeline parallelism is: "
            "Accelerator(parallelism_config=ParallelismConfig(tp_size=..., pp_size=...))"
        )
