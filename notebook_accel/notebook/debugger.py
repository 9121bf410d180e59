"""``%accelerate debug``: look into the frames of an error in a rank, after a failed launch or cell.

    launch_for_debugger --> ranks, one call --> a rank raised: the ranks wait <-- %accelerate debug
                                            --> the call ended otherwise: the ranks end
    cell: input("rank 1 (pdb) ") --DebugCall--> pdb in the rank --> text, printed in the cell

With ``notebook_launcher(..., debug=True)`` the ranks stay alive after one of them raised: the
launch is held. At most one launch is held at a time. Its ranks, and their memory on devices, are
freed when the user leaves the debugger (q), with the next launch or ``%%accelerate`` cell, with
``%accelerate stop``, and when the kernel ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from IPython.core.error import StdinNotImplementedError
from IPython.core.getipython import get_ipython

from notebook_accel.errors import NotebookAccelError, WorkerError
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.launcher import Session
from notebook_accel.launch.run import Run
from notebook_accel.launch.text import wording
from notebook_accel.launch.view import GuardedView
from notebook_accel.notebook.clicks import can_answer, find_kernel
from notebook_accel.notebook.worker.calls import DebugAnswer, DebugCall

_HINT = (
    "`%accelerate debug` looks into its frames; the ranks wait for that until the next launch or "
    "`%accelerate stop`"
)

HINT_TO_DEBUG = "To look into its frames: launch with debug=True, then `%accelerate debug`"

_held: HeldLaunch | None = None


@dataclass(frozen=True)
class HeldLaunch:
    """The ranks of a failed launch, kept for ``%accelerate debug``; no rank may be at fault."""

    session: Session
    name: str
    rank_at_fault: int | None


def held_launch() -> HeldLaunch | None:
    """Return the launch whose ranks wait for a debugger; None where there is none."""
    return _held


def end_held_launch() -> bool:
    """End the ranks that wait for a debugger; return whether there were any."""
    global _held
    held, _held = _held, None
    if held is not None:
        held.session.close()
    return held is not None


def launch_for_debugger(request: LaunchRequest) -> Run:
    """As :func:`notebook_accel.launch.launcher.launch`, but hold the ranks if one raised."""
    shell: Any = get_ipython()
    shell.extension_manager.load_extension("notebook_accel")
    request = replace(request, view=GuardedView(request.view), keeps_error=True)
    try:
        session = Session(request)
    except BaseException:
        request.view.launch_failed()
        raise
    try:
        run = session.call(replace(request, notices=(*request.notices, *session.notices)))
    except BaseException as error:
        if session.newest_call is None:
            request.view.launch_failed()
        if _hold_or_end(session) and isinstance(error, WorkerError):
            error.hint = _HINT
        raise
    _hold_or_end(session)
    return run


def _hold_or_end(session: Session) -> bool:
    """Return True if the ranks are held: one raised, and a person can debug."""
    global _held
    run = session.newest_call
    failure = None if run is None else run.state.failure
    can_wait = session.status not in ("broken", "ended") and can_answer(find_kernel())
    if run is None or failure is None or not failure.traceback or not can_wait:
        session.close()
        return False
    end_held_launch()
    _held = HeldLaunch(session, run.name, failure.rank)
    return True


def debug(
    ask: Callable[[DebugCall], list[DebugAnswer | None]],
    rank: int | None,
    at_fault: Callable[[], int | None],
) -> None:
    """Read pdb commands from the user and run them in a rank that has an error, until they quit.

    Args:
        ask: returns an answer a rank; None from one without an error, and from those not asked.
        rank: None is the rank at fault, or else the first one with an error.
        at_fault: asked after the first answers: the rank that failed first; None if none is known.

    Raises:
        NotebookAccelError: no such rank has an error, or nobody can answer ``input()`` here.
    """
    answers = ask(DebugCall())
    failed = [number for number, answer in enumerate(answers) if answer is not None]
    if not failed:
        raise NotebookAccelError(
            "no rank has an error to look into: a cell or a function call that fails leaves one, "
            "until the next one runs"
        )
    if rank is None:
        first = at_fault()
        rank = failed[0] if first is None or first not in failed else first
    if rank not in failed:
        verb = "has" if len(failed) == 1 else "have"
        raise NotebookAccelError(
            f"rank {rank} has no error to look into; {wording.rank_list(failed)} {verb}"
        )
    answer = answers[rank]
    while answer is not None and not answer.is_over:
        print(answer.text, end="")  # noqa: T201
        try:
            command = input(f"rank {rank} (pdb) ")
        except (StdinNotImplementedError, EOFError) as error:
            raise NotebookAccelError(
                "%accelerate debug asks for commands, and nobody can be asked here: use a frontend "
                "with input fields (JupyterLab, Notebook, VS Code, Colab, a terminal)"
            ) from error
        answer = ask(DebugCall(command=command, rank=rank))[rank]
