"""The template is started before the first launch, by the first sign that there will be one."""

from __future__ import annotations

from IPython.core.getipython import get_ipython

from notebook_accel.launch.system import processes
from notebook_accel.launch.template.handle import warm

__all__ = ["warm_kernel"]


def warm_kernel() -> None:
    """Start the template in the background, where this process is the kernel of a notebook.

    A launch some seconds later is then as fast as any. In a script, whose first launch follows at
    once or never, and in a rank nothing is started. Nor is anything raised: the launch itself
    will say what is wrong.
    """
    if getattr(get_ipython(), "kernel", None) is not None and processes.supported():
        warm()
