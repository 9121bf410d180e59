"""Settings of an ``Accelerator``: plugins, ``kwargs_handlers`` and environment variables."""
