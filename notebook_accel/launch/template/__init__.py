"""The template process, from which agents are forked: its own code and the kernel's handle."""
