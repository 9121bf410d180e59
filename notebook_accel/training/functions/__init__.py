"""Code on top of ``Accelerator``: local SGD, FSDP functions, names predefined in notebook cells."""
