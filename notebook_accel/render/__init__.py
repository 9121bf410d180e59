"""HTML made of a run's state: without IPython, so that any frontend can show it."""
