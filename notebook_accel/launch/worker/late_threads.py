"""Says why a rank whose function has returned does not end: a thread of the user's goes on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accel.launch.rank import RankContext

__all__ = ["announce"]

# Threads of a pool that has nothing to do end at once when Python leaves.
_PATIENCE_SECONDS = 1.0


def announce(context: RankContext) -> None:
    """Have the person told of threads that keep this process, if it is still there in a second."""
    timer = threading.Timer(_PATIENCE_SECONDS, _name_late_threads, args=(context,))
    timer.daemon = True
    timer.start()


def _name_late_threads(context: RankContext) -> None:
    main = threading.main_thread()
    late = [thread.name for thread in threading.enumerate() if not thread.daemon]
    names = [f"`{name}`" for name in late if name != main.name]
    if names:
        context.notice(
            f"the function has ended, but threads that it started go on ({', '.join(names)}), and "
            "the run with them: join them before the return, or start them with daemon=True"
        )
