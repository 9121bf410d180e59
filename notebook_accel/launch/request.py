"""What is asked for: ranks, and a function that they are to call.

A :class:`LaunchRequest` is built where the person's arguments arrive (``notebook_launcher``, a
magic, the picker, the command line) and passed on whole: to the launcher, to the engine that brings
the ranks about, and to the call that runs on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.view import View

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_accel.config import LaunchConfig
    from notebook_accel.launch.payload import CellSource

__all__ = ["LaunchRequest"]


def _nothing() -> None:
    """In the place of the person's function, where ranks are asked for and nothing is called."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """One launch, or one call of a session.

    Attributes:
        config: how to launch.
        function, args, kwargs: each rank calls ``function(*args, **kwargs)``. A session is asked
            for without them.
        name: what the person calls the run; "": as the function.
        view: shows the run.
        sources: the cells from which code comes.
        block: wait for the end, and raise the run's error.
        timeout: seconds after which the run is ended; None for never.
        detach: the run goes on when this process ends (detached.py).
        notices: lines for the person that are known already.
        advise: say at the end what a training function seems to have forgotten.
        asked: the ranks on which a session's call does its work, as views show it; None for all.
        brings_globals: whether the globals of a function of the notebook travel along; otherwise it
            uses what the ranks of a session have under these names.
        keeps_error: a rank keeps what the call raises, for a debugger.
        environment: of every rank, without what the engine adds; the launcher fills it in.
        arguments: what the function is called with, as a short text; the launcher fills it in.
        notebook: what cells have set up beside variables, pickled; b"": as it is in this process.
    """

    config: LaunchConfig
    function: Callable[..., Any] = _nothing
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    view: View = field(default_factory=View)
    sources: Sequence[CellSource] = ()
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

    def without_function(self) -> LaunchRequest:
        """The same ranks, without what is the person's and should not be kept or pickled."""
        return replace(self, function=_nothing, args=(), kwargs={})
