"""Door: ``accelerate.utils.other`` under our name."""

from notebook_accel.training.nested import (
    merge_dicts,
)
from notebook_accel.training.prepare import (
    extract_model_from_parallel,
)
from notebook_accel.training.saving import (
    load,
    save,
)
from notebook_accel.training.topology import (
    barrier as wait_for_everyone,
)

__all__ = [
    "merge_dicts",
    "extract_model_from_parallel",
    "load",
    "save",
    "wait_for_everyone",
]
