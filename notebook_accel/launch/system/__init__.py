"""What the platform gives: processes, signals and interrupts, scratch files."""
