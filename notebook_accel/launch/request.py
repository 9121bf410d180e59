"""The request for a launch: the settings, and the function that each rank is to call.

A :class:`LaunchRequest` is built where the user's arguments arrive (``notebook_launcher``, a
magic, the picker, the command line). It is passed to the launcher, to the engine that starts the
ranks, and to the call that runs on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.view import View

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_accel.config import LaunchConfig
    from notebook_accel.launch.payload import CellSource
    from notebook_accel.launch.setup.steps import Step


def _nothing() -> None:
    """Do nothing, in place of the user's function in a request that only starts ranks."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What the user asked for: one launch, one call of a session, or the ranks of a session.

    Attributes:
        config: the settings of the launch.
        function, args, kwargs: each rank calls ``function(*args, **kwargs)``. A request for the
            ranks of a session leaves them out.
        name: name of the run; "" stands for the name of the function.
        view: shows the run.
        sources: the source of the notebook's cells, for error messages and exports.
        setup: what the notebook did to libraries, which ranks repeat before the call.
        block: whether the launch waits for the end of the run and raises the run's error.
        timeout: seconds after which the run is ended; None for no limit.
        detach: whether the run goes on when this process ends (detached.py).
        notices: lines for the user that are known before the launch.
        advise: whether to tell the user at the end what the function seems to have forgotten.
        asked: ranks for which a call of a session is meant; views show that the other ranks were
            not asked. None for all ranks.
        brings_globals: whether the notebook's globals that the function uses are sent with the
            function; otherwise the function uses the session's globals of these names.
        keeps_error: whether a rank keeps the exception that the call raises, for a debugger.
        environment: environment variables of every rank, without those that the engine adds; if
            empty, the launcher fills it in.
        arguments: the function's arguments as a short text, which the launcher fills in.
        notebook: pickled state of the notebook other than its variables, such as random generators
            and loggers; b"" for the state of this process.
        run_id: id of the run, if it is already known; else "".
        poll: called several times a second while machines or room are awaited; its errors end the
            wait.
    """

    config: LaunchConfig
    function: Callable[..., Any] = _nothing
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    view: View = field(default_factory=View)
    sources: Sequence[CellSource] = ()
    setup: Sequence[Step] = ()
    block: bool = True
    timeout: float | None = None
    detach: bool = False
    notices: tuple[str, ...] = ()
    advise: bool = True
    asked: frozenset[int] | None = None
    brings_globals: bool = True
    keeps_error: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: str = ""
    notebook: bytes = b""
    run_id: str = ""
    poll: Callable[[], None] = _nothing

    def without_function(self) -> LaunchRequest:
        """Return a copy without the user's function and arguments, which should not be kept."""
        return replace(self, function=_nothing, args=(), kwargs={})
