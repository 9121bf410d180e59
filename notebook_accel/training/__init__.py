"""The code that runs inside each rank (training process): the ``Accelerator`` and its parts.

It imports torch and never IPython, so that scripts can use it without a notebook.
"""
