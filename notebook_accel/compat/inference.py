"""Door: ``accelerate.inference`` under our name."""

from notebook_accel.training.big_modeling.pipelined import prepare_pippy as prepare_pippy
