"""A rank's own side: its environment, output, bars and calls."""
