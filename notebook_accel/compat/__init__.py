"""Modules under the paths of Accelerate's modules, for code that imports from these.

``notebook_accel/compat/state.py`` is importable as ``notebook_accel.state``, the counterpart of
``accelerate.state``.
"""
