"""The only place where Python's own private names are used; a new release may change them."""

from __future__ import annotations

import atexit
import multiprocessing
import threading
from multiprocessing import util
from typing import Any

__all__ = [
    "end_multiprocessing",
    "forget_exit_functions",
    "join_threads",
    "process_settings",
    "run_exit_functions",
    "run_finalizers",
]


def join_threads() -> None:
    """Wait for this process's threads as Python does at its exit (``threading._shutdown``).

    A rank is a forked child, which leaves without Python's usual exit. Without this call, it would
    end before the threads that its function started, and their work would be lost.
    """
    threading._shutdown()  # type: ignore[attr-defined]


def forget_exit_functions() -> None:
    """Forget the ``atexit`` functions that were registered before a fork (``atexit._clear``).

    A process calls this just after it was forked. Otherwise it would run, at its exit, the
    functions that its parent registered for itself.
    """
    atexit._clear()


def run_exit_functions() -> None:
    """Call the functions registered with ``atexit`` now (``atexit._run_exitfuncs``).

    A process that multiprocessing forked, such as a rank, ends without calling them.
    """
    atexit._run_exitfuncs()


def run_finalizers() -> None:
    """Make multiprocessing's pools and managers end their workers (``util._run_finalizers``).

    A rank calls this before it ends its remaining children by a signal. Without it, a worker that
    gets SIGTERM while it holds a lock would make its pool wait for ever.
    """
    util._run_finalizers(0)  # type: ignore[attr-defined]


def end_multiprocessing() -> None:
    """Join this process's children and flush its queues (``multiprocessing.util._exit_function``).

    Without it, the last items that a rank put into a queue may not arrive.
    """
    util._exit_function()  # type: ignore[attr-defined]


def process_settings() -> dict[str, Any]:
    """Return multiprocessing's settings of this process, to be changed (``Process._config``).

    The caller sets the folder for temporary files and the prefix of semaphore names. Without these,
    semaphores and sockets of killed workers cannot be found, and stay until the machine restarts.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config
