"""What is done with a kernel at the first sign that there will be a launch.

One of it is for ipykernel 7.0 to 7.3, which leaves requests unread, so that a kernel is dead to its
pages for good. Its thread for the shell channel reads that socket by a stream, and sends replies
past the stream. A request that comes while a reply is sent makes no event for the stream then, and
neither does any request after it: sockets of zmq tell of new messages only once all were read. A
click and the next cell are enough. ipykernel 7.4 sends by the stream; for older ones, the stream is
made to look.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

from IPython.core.getipython import get_ipython

from notebook_accel.launch.system import processes
from notebook_accel.launch.template.handle import warm

__all__ = ["keep_reading", "warm_kernel"]

# What a request that was left unread waits at most. To look takes some 10 us.
_LOOK_SECONDS = 0.1


@functools.cache
def keep_reading(kernel: Any) -> None:
    """Make ipykernel 7.0 to 7.3 poll its shell socket, whose requests it may leave unread.

    Args:
        kernel: the kernel of a notebook; None in a terminal, where there is nothing to do.
    """
    thread: Any = getattr(kernel, "shell_channel_thread", None)
    version = importlib.metadata.version("ipykernel").split(".")[:2]
    if thread is not None and tuple(map(int, version)) < (7, 4):
        thread.io_loop.add_callback(_look, thread.io_loop, kernel.shell_stream)


def _look(loop: Any, stream: Any) -> None:
    # Closed where the kernel shuts down.
    if not stream.closed():
        stream.flush()
        loop.call_later(_LOOK_SECONDS, functools.partial(_look, loop, stream))


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
