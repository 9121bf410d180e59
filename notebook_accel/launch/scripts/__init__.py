"""Scripts made of a notebook's cells: of a run's function, and of a cell of ``%%accelerate``."""
