"""Agent process: supervises the ranks of one run on one machine."""
