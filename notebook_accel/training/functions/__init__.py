"""What stands on an ``Accelerator``: local SGD, FSDP functions, the names of a session's cells."""
