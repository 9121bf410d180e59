"""A counterpart of ``accelerate.parallelism_config``."""

from notebook_accel.compat import _accelerate

__getattr__, __dir__, __all__ = _accelerate.door("parallelism_config")
