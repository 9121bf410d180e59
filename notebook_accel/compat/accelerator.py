"""A counterpart of ``accelerate.accelerator``."""

from notebook_accel.compat import _accelerate

__getattr__, __dir__, __all__ = _accelerate.door("accelerator")
