"""Functions and classes that take an ``Accelerator``."""
