"""What the platform gives: processes, signals, scratch files."""
