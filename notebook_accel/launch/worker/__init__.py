"""The code that runs in a rank's process: its environment, output, progress bars and calls."""
