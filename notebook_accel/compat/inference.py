"""Door: ``accelerate.inference`` under our name, with what it has imported there."""

from notebook_accel.training.big_modeling.pipelined import prepare_pippy as prepare_pippy

from .state import *
from .utils import *
