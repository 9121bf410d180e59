"""Makes ``notebook_accel.utils.tqdm`` a counterpart of ``accelerate.utils.tqdm``."""

from notebook_accel.training.processes.logs import tqdm
