"""A run as the notebook's kernel sees it: connections to its ranks, state, files and verdict."""
