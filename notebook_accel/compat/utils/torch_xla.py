"""Door: ``accelerate.utils.torch_xla`` under our name."""

from notebook_accel.training.refused import install_xla as install_xla
