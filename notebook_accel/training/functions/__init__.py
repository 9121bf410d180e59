"""Code on top of ``Accelerator``: local SGD, FSDP functions, names that notebook cells get."""
