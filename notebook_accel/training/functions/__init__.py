"""Code that uses an ``Accelerator``: local SGD, FSDP functions, the names that a cell finds."""
