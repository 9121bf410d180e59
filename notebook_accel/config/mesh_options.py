"""The fields of ``ParallelismConfig``, which says how many ranks each kind of parallelism uses.

This file imports no torch, since it is imported in the notebook's kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from notebook_accel.config.setting import setting

_size = partial(setting, own="", prefix="PARALLELISM_CONFIG_", fallback=1)


@dataclass
class MeshOptions:
    """Base class of ``ParallelismConfig`` that declares its fields.

    The sizes made by ``_size`` can also be set as ``LaunchConfig(parallelism={...})``.
    """

    dp_replicate_size: int | None = _size(
        about="Copies of the model (or of its shards) that read different samples"
    )
    dp_shard_size: int | None = _size(
        about="Ranks over which one copy is sharded (FSDP2), each with its own samples"
    )
    tp_size: int | None = _size(about="Ranks that compute each layer together")
    cp_size: int | None = _size(
        about="Ranks that divide each sequence; the loop trains inside "
        "``accelerator.maybe_context_parallel``. Weights are sharded over them, too"
    )
    cp_backend: str | None = None
    """There is "torch" alone. Variable PARALLELISM_CONFIG_CP_BACKEND."""
    sp_size: int | None = None
    """Refused beyond 1: sequences are divided by ``cp_size``."""
    sp_backend: str | None = None
    """There is "deepspeed" alone. Variable PARALLELISM_CONFIG_SP_BACKEND."""
    tp_handler: Any = None
    """A ``TorchTensorParallelConfig``."""
    cp_handler: Any = None
    """A ``TorchContextParallelConfig``."""
    sp_handler: Any = None
    """Accepted."""
    pp_size: int | None = _size(
        about="Ranks of a pipeline, over which the model's blocks are divided; the loop calls "
        "``accelerator.forward_backward``. Composes with all but ``cp_size``"
    )
    pp_schedule: str = "1F1B"
    """In which order the stages work: "1F1B", "GPipe" or "Interleaved1F1B" (two stages a rank)."""
    num_microbatches: int | None = None
    """Parts of a batch that follow each other through the pipeline; None: two a rank."""
    tp_plan: Mapping[str, Any] | None = None
    """How layers are divided: module name, or pattern with ``*``, to "colwise", "rowwise", or a
    ``ParallelStyle`` of torch; None takes the model's own ``tp_plan`` or ``_tp_plan``."""
