"""What is done with a kernel at the first sign that there will be a launch."""

from __future__ import annotations

from IPython.core.getipython import get_ipython

from notebook_accel.launch.system import processes
from notebook_accel.launch.template.handle import warm
from notebook_accel.notebook.unread_requests import keep_reading

__all__ = ["warm_kernel"]


def warm_kernel() -> None:
    """Start the template in the background, where this process is the kernel of a notebook.

    A launch some seconds later is then as fast as any. In a script, whose first launch follows at
    once or never, and in a rank nothing is started. The kernel reads all its requests from now on.
    Nothing is raised: the launch itself will say what is wrong.
    """
    kernel = getattr(get_ipython(), "kernel", None)
    keep_reading(kernel)
    if kernel is not None and processes.supported():
        warm()
