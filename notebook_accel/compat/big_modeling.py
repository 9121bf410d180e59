"""A counterpart of ``accelerate.big_modeling``."""

from notebook_accel.compat import _accelerate

__getattr__, __dir__, __all__ = _accelerate.door("big_modeling")
