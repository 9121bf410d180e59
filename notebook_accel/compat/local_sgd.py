"""Door: ``accelerate.local_sgd`` under our name."""

from notebook_accel.training.local_sgd import LocalSGD as LocalSGD
