"""Private names of Python's own library."""

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
    """Wait for threads as Python does at its end (``threading._shutdown``).

    Without it a rank ends before the threads of its function, and what they had to do is lost.
    """
    threading._shutdown()  # type: ignore[attr-defined]


def forget_exit_functions() -> None:
    """Forget the functions registered with ``atexit`` before a fork (``atexit._clear``).

    Without it a rank calls at its end what the process was told before the fork.
    """
    atexit._clear()


def run_exit_functions() -> None:
    """Call the functions registered with ``atexit`` (``atexit._run_exitfuncs``).

    Without it nothing that a function has registered is called: a fork ends without that.
    """
    atexit._run_exitfuncs()


def run_finalizers() -> None:
    """Have pools and managers end their workers (``multiprocessing.util._run_finalizers``).

    Without it a worker that gets SIGTERM with a lock in hand makes its pool wait for ever.
    """
    util._run_finalizers(0)  # type: ignore[attr-defined]


def end_multiprocessing() -> None:
    """Join children and flush queues (``multiprocessing.util._exit_function``).

    Without it what was put into a queue last may not arrive.
    """
    util._exit_function()  # type: ignore[attr-defined]


def process_settings() -> dict[str, Any]:
    """Return multiprocessing's settings of this process (``_config``): folder, semaphores.

    Without it semaphores and sockets of killed workers stay until the machine is restarted.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config
