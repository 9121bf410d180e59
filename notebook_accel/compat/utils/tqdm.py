"""Door: ``accelerate.utils.tqdm`` under our name."""

from notebook_accel.training.progress import tqdm
