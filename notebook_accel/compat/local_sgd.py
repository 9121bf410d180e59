"""A counterpart of ``accelerate.local_sgd``."""

from notebook_accel.compat import _accelerate

__getattr__, __dir__, __all__ = _accelerate.door("local_sgd")
