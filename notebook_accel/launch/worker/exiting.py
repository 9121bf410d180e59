"""How a rank process ends once the result of its last call was sent.

    the user's threads end -> functions registered with atexit -> pools and managers of
    multiprocessing end their workers -> other children are ended -> exit

The agent has the result by then. The user's non-daemon threads are waited for without limit, as
Python itself does. All later steps together get five seconds; then the process ends at once, and a
line tells the user. Without this limit the notebook's cell would wait for a child that has
nothing to do (idle workers of joblib stay for 300 s) or for a queue that nobody reads.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import psutil

from notebook_accel.private import of_libraries
from notebook_accel.system import processes

# For everything after the user's threads; the second, of the first, for children to end by SIGTERM.
_EXIT_SECONDS = 5.0
_CHILDREN_SECONDS = 1.0
# For the line that says that the time is over.
_TELL_SECONDS = 1.0
# The processes of multiprocessing and joblib that look after shared memory have this in their
# command. They ignore SIGTERM: to wait for one would use up `_CHILDREN_SECONDS`.
_TRACKER = "resource_tracker"
_CUT = (
    "what was left to do once the function had ended (atexit, pools and queues of multiprocessing) "
    f"took more than {_EXIT_SECONDS:g} s, and was cut: do before the return what takes longer"
)


def finish(code: int, notice: Callable[[str], None]) -> None:
    """Wait for the user's threads, run the functions registered with ``atexit``, end the children.

    Called in the rank's main thread; the caller then exits the process. If the steps after the
    threads take more than five seconds, the process is ended from here, by another thread.
    """
    of_libraries.join_threads()
    # Never cancelled, so that it also bounds what multiprocessing does after this function.
    too_long = threading.Timer(_EXIT_SECONDS, _give_up, (code, notice))
    too_long.daemon = True
    too_long.start()
    # A process of multiprocessing ends without running these, so they are run here.
    of_libraries.run_exit_functions()
    if processes.has_children():
        children = [child for child in psutil.Process().children() if not _is_tracker(child)]
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.terminate()
        psutil.wait_procs(children, timeout=_CHILDREN_SECONDS)
        processes.kill_tree(child.pid for child in psutil.Process().children())
    # Python 3.13 registers this with `atexit`, which the rank has cleared; others call it later.
    of_libraries.end_multiprocessing()


def _give_up(code: int, notice: Callable[[str], None]) -> None:
    # In a thread of its own: what hangs may hold a lock that this needs.
    telling = threading.Thread(target=notice, args=(_CUT,), daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread is to be had
        telling.start()
        telling.join(_TELL_SECONDS)
    processes.kill_tree(child.pid for child in psutil.Process().children())
    os._exit(code)


def _is_tracker(child: psutil.Process) -> bool:
    try:
        return any(_TRACKER in word for word in child.cmdline())
    except psutil.Error:  # it has ended
        return False
