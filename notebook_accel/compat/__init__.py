"""Modules under the paths of Accelerate's: ``compat/state.py`` is ``notebook_accel.state``.

Each has this package's versions of names that Accelerate's module defines or imports. Other names
come from Accelerate, if it is installed (``_accelerate.door``).
"""
