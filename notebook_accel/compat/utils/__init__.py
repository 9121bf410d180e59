"""A counterpart of ``accelerate.utils`` and its submodules."""

from notebook_accel.compat import _accelerate

from .tqdm import *

__getattr__, __dir__, __all__ = _accelerate.door("utils")
_accelerate.open_below(
    __name__,
    "utils",
    [
        *("ao", "bnb", "constants", "dataclasses", "deepspeed", "environment", "fsdp_utils"),
        *("imports", "launch", "megatron_lm", "memory", "modeling", "offload", "operations"),
        *("other", "random", "torch_xla", "transformer_engine", "versions"),
    ],
)
