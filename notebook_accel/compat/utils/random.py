"""Door: ``accelerate.utils.random`` under our name."""

from notebook_accel.training.seeding import (
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)

__all__ = [
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]
