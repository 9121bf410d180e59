"""Door: ``accelerate.accelerator`` under our name."""

from notebook_accel.training.accelerator import Accelerator as Accelerator
