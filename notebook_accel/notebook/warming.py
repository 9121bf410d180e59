"""Prepare a kernel for a launch that will probably come: start the template, mend ipykernel.

The template is the helper process from which ranks are forked; it takes seconds to start. From then
on it imports the libraries that cells import (imports.py).

ipykernel 7.0 to 7.3 may leave requests unread, which makes a kernel dead to its pages for good. Its
thread for the shell channel reads that socket by a stream of events, but sends replies past the
stream. A request that arrives while a reply is sent makes no event then, nor does any later one:
zmq's sockets signal new messages only once all earlier ones were read. A click right before the
next cell is enough. For these versions, the stream is made to look at its socket at intervals;
ipykernel 7.4 sends by the stream and needs no help.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

from IPython.core.getipython import get_ipython

from notebook_accel.launch.template.handle import warm
from notebook_accel.notebook.imports import follow_imports
from notebook_accel.system import processes

# What a request that was left unread waits at most. To look takes some 10 us.
_LOOK_SECONDS = 0.1


@functools.cache
def keep_reading(kernel: Any) -> None:
    """Make ipykernel 7.0 to 7.3 poll its shell socket; other versions, and None, are left alone."""
    thread: Any = getattr(kernel, "shell_channel_thread", None)
    version = importlib.metadata.version("ipykernel").split(".")[:2]
    if thread is None or tuple(map(int, version)) >= (7, 4):
        return

    def look() -> None:
        # Closed where the kernel shuts down.
        if not kernel.shell_stream.closed():
            kernel.shell_stream.flush()
            thread.io_loop.call_later(_LOOK_SECONDS, look)

    thread.io_loop.add_callback(look)


def prepare(shell: Any) -> None:
    """Start the template in the background; the launch itself will report its errors."""
    keep_reading(getattr(shell, "kernel", None))
    warm()
    follow_imports(shell)


def warm_kernel() -> None:
    """Prepare if this process is the kernel of a notebook.

    Not in a script, whose first launch comes at once or never, nor in a rank.
    """
    shell = get_ipython()
    if getattr(shell, "kernel", None) is not None and processes.supported():
        prepare(shell)
