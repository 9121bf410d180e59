"""The clean process from which agents fork: the kernel's side and the process's side."""
