"""The request for a launch: the settings, and the function that each rank is to call.

A :class:`LaunchRequest` is built where the user's arguments arrive (``notebook_launcher``, a
magic, the picker, the command line). It is passed to the launcher, to the engine that starts the
ranks, and to the call that runs on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from notebook_accel.config import LaunchConfig
from notebook_accel.launch.control.run_state import TrialOf
from notebook_accel.launch.payload.cells import CellSource
from notebook_accel.launch.setup import Step
from notebook_accel.launch.view import View
from notebook_accel.wire import KnobValue


def _nothing() -> None:
    """Do nothing, in place of the user's function in a request that only starts ranks."""


def _no_view(*, waits: bool) -> View:  # noqa: ARG001
    return View()


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What the user asked for: one launch, one call of a session, or the ranks of a session.

    Attributes:
        function, args, kwargs: each rank calls ``function(*args, **kwargs)``. A request for the
            ranks of a session leaves them out.
        name: name of the run; "" stands for the name of the function.
        asked: ranks for which a call of a session is meant; views show that the other ranks were
            not asked. None for all ranks.
        resume: folder of the checkpoint with which the training begins; "" if it begins anew.
        origin: id of the run that is cloned, or goes on; "" if there is none.
        trial: which trial of a sweep the run is; None if it is none.
        knobs: values with which knobs begin, in place of their defaults.
        devices: accelerators of this machine that the ranks use; the launcher fills it in.
        new_view: makes the view of a clone of the run; called with ``waits=``.
        brings_globals: whether the notebook's globals that the function uses are sent with the
            function; otherwise the function uses the session's globals of these names.
        environment: environment variables of every rank, without those that the engine adds; if
            empty, the launcher fills it in.
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
    run_id: str = ""
    resume: str = ""
    origin: str = ""
    trial: TrialOf | None = None
    knobs: Mapping[str, KnobValue] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    new_view: Callable[..., View] = _no_view
    poll: Callable[[], None] = _nothing

    def without_function(self) -> LaunchRequest:
        return replace(self, function=_nothing, args=(), kwargs={}, new_view=_no_view)
