"""Real kernels, from the first cell to their death."""
