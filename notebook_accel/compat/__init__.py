"""Modules under the paths of Accelerate's: ``compat/state.py`` is ``notebook_accel.state``.

Each has all names of ours that a module of Accelerate has. Other names come from Accelerate, if it
is installed (``_accelerate.door``).
"""
