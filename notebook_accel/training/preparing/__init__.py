"""``Accelerator.prepare``: settings, prepared objects, and their state after a stopped run."""
