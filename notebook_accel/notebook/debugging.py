"""``debug_launcher``: a function on a few processes of the CPU, as tests run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.notebook.launcher import notebook_launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_accel.launch.run import Run

__all__ = ["debug_launcher"]


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> Run:
    """Call ``function(*args)`` on processes of the CPU in debug mode, in full precision whatever
    the environment and the default config file say.

    Args:
        function: what each rank calls.
        args: its arguments.
        num_processes: number of ranks.

    Returns:
        the run, which has ended.

    Raises:
        ConfigError, LaunchError, WorkerError, RunStopped, KeyboardInterrupt: as of
            ``notebook_launcher``.
    """
    return notebook_launcher(
        function, args, num_processes, mixed_precision="no", devices="cpu", debug=True
    )
