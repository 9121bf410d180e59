"""A counterpart of ``accelerate.data_loader``."""

from notebook_accel.compat import _accelerate

__getattr__, __dir__, __all__ = _accelerate.door("data_loader")
