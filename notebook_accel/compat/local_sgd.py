"""Door: ``accelerate.local_sgd`` under our name, with what it has imported there."""

from notebook_accel.training.local_sgd import LocalSGD as LocalSGD

from .accelerator import Accelerator as Accelerator
from .state import *
