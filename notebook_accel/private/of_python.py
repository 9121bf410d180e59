"""The only place where Python's own private names are used; a new release may change them."""

from __future__ import annotations

import atexit
import multiprocessing
import threading
from multiprocessing import util
from typing import Any


def join_threads() -> None:
    """Wait for this process's threads, as Python does at its exit.

    A rank is a forked child, which ends without Python's usual exit. This uses
    ``threading._shutdown``. If Python removed it, a rank would end before the threads that its
    function started, and their work would be lost.
    """
    threading._shutdown()  # type: ignore[attr-defined]


def forget_exit_functions() -> None:
    """Forget the ``atexit`` functions that were registered before a fork.

    A process calls this just after it was forked. This uses ``atexit._clear``. If Python removed
    it, the process would run, at its exit, the functions that its parent registered for itself.
    """
    atexit._clear()


def run_exit_functions() -> None:
    """Call now the functions registered with ``atexit``.

    This uses ``atexit._run_exitfuncs``. If Python removed it, these functions would never be called
    in a rank: a process that multiprocessing forked ends without calling them.
    """
    atexit._run_exitfuncs()


def run_finalizers() -> None:
    """Make multiprocessing's pools and managers end their workers.

    A rank calls this before it ends its remaining children by a signal. This uses
    ``util._run_finalizers``. If Python removed it, a pool would wait for ever if a worker got
    SIGTERM while it held a lock.
    """
    util._run_finalizers(0)  # type: ignore[attr-defined]


def end_multiprocessing() -> None:
    """Join this process's children and flush its queues.

    This uses ``multiprocessing.util._exit_function``. If Python removed it, the last items that a
    rank put into a queue might not arrive.
    """
    util._exit_function()  # type: ignore[attr-defined]


def process_settings() -> dict[str, Any]:
    """Return multiprocessing's settings of this process, which the caller changes.

    This uses ``Process._config``. The caller sets the folder for temporary files and the prefix of
    semaphore names. With multiprocessing's own values, semaphores and sockets of killed workers
    could not be found, and would stay until the machine restarts.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config
