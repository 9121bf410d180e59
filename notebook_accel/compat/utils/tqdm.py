"""Door: ``accelerate.utils.tqdm`` under our name."""

from notebook_accel.training.tracking.progress import tqdm
