"""A counterpart of ``accelerate.checkpointing``."""

from notebook_accel.compat import _accelerate

__getattr__, __dir__, __all__ = _accelerate.door("checkpointing")
