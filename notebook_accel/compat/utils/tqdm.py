"""Door: ``accelerate.utils.tqdm`` under our name, with what it has imported there."""

from notebook_accel.training.progress import tqdm as tqdm
from notebook_accel.training.state import PartialState as PartialState

from .imports import *
