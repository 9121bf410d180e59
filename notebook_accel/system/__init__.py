"""Helpers around the operating system: processes, interrupts, log files and scratch files."""
