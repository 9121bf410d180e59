"""The frames of an error in a rank: ``%accelerate debug``, and the ranks that wait for it.

    launch_for_debugger --> ranks, one call --> a rank raised: they wait <--- %accelerate debug
                                            --> it ended otherwise: they end
    cell: input("rank 1 (pdb) ") --DebugCall--> the rank's PostMortem --> text, printed in the cell

With ``notebook_launcher(..., debug=True)`` the ranks stay where one fails. At most one launch is
held. Its ranks, and what they have on devices, go when the debugger is left (q), with the next
launch or cell of ``%%accelerate``, with `%accelerate stop`, and with the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from IPython.core.error import StdinNotImplementedError
from IPython.core.getipython import get_ipython

from notebook_accel.errors import NotebookAccelError, WorkerError
from notebook_accel.launch.launcher import Session
from notebook_accel.launch.text import wording
from notebook_accel.launch.view import GuardedView
from notebook_accel.notebook.clicks import can_answer, find_kernel
from notebook_accel.notebook.worker.calls import DebugCall

if TYPE_CHECKING:
    from notebook_accel.launch.request import LaunchRequest
    from notebook_accel.launch.run import Run
    from notebook_accel.notebook.session import NotebookSession
    from notebook_accel.notebook.worker.calls import DebugAnswer

__all__ = ["HeldLaunch", "debug", "end_held_launch", "held_launch", "launch_for_debugger"]

_HINT = (
    "`%accelerate debug` looks into its frames; the ranks wait for that until the next launch or "
    "`%accelerate stop`"
)

_held: HeldLaunch | None = None


@dataclass(frozen=True)
class HeldLaunch:
    """The ranks of a launch that failed.

    Attributes:
        session: the ranks.
        name: what the person calls the launch.
        rank_at_fault: the rank whose error ended it; None where no rank's did.
    """

    session: Session
    name: str
    rank_at_fault: int | None

    def ask_debuggers(self, request: DebugCall) -> list[DebugAnswer | None]:
        """Send a command to the ranks' debuggers; return their answers, None for no answer."""
        return self.session.ask(request)


def held_launch() -> HeldLaunch | None:
    """The launch whose ranks wait for a debugger; None where there is none."""
    return _held


def end_held_launch() -> bool:
    """End the ranks that wait for a debugger; False where there are none."""
    global _held
    held, _held = _held, None
    if held is not None:
        held.session.close()
    return held is not None


def launch_for_debugger(request: LaunchRequest) -> Run:
    """Launch as ``launch.launcher.launch``, wait for the end, and hold the ranks if one raises.

    Raises:
        ConfigError, LaunchError, WorkerError, RunStopped, TimeoutError: as there.
    """
    _load_magics()
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
    """Keep the ranks of an ended launch if one raised and a person can debug it; else end them."""
    global _held
    run = session.newest_call
    failure = None if run is None else run.state.failure
    is_whole = session.status not in ("broken", "ended")
    if (
        run is None
        or failure is None
        or not failure.traceback
        or not is_whole
        or not can_answer(find_kernel())
    ):
        session.close()
        return False
    end_held_launch()
    _held = HeldLaunch(session, run.name, failure.rank)
    return True


def _load_magics() -> None:
    """Register ``%accelerate``, so that ``%accelerate debug`` works."""
    shell: Any = get_ipython()
    shell.extension_manager.load_extension("notebook_accel")


def debug(failed_call: NotebookSession | HeldLaunch, rank: int | None = None) -> None:
    """Look into the error of a rank, by commands of pdb, until the person leaves them.

    Args:
        failed_call: the session, or the launch that is held: whose ranks are asked.
        rank: whose error; None: that of the rank at fault.

    Raises:
        NotebookAccelError: no rank has an error, this one has none, or nobody can be asked.
    """
    answers = failed_call.ask_debuggers(DebugCall())
    failed = [number for number, answer in enumerate(answers) if answer is not None]
    if not failed:
        raise NotebookAccelError(
            "no rank has an error to look into: a cell or a function call that fails leaves one, "
            "until the next one runs"
        )
    if rank is None:
        at_fault = failed_call.rank_at_fault
        rank = failed[0] if at_fault is None or at_fault not in failed else at_fault
    if rank not in failed:
        verb = "has" if len(failed) == 1 else "have"
        raise NotebookAccelError(
            f"rank {rank} has no error to look into; {wording.rank_list(failed)} {verb}"
        )
    answer = answers[rank]
    while answer is not None and not answer.is_over:
        print(answer.text, end="")  # noqa: T201
        request = DebugCall(command=_ask_for_command(f"rank {rank} (pdb) "), rank=rank)
        answer = failed_call.ask_debuggers(request)[rank]


def _ask_for_command(prompt: str) -> str:
    try:
        return input(prompt)
    except (StdinNotImplementedError, EOFError) as error:
        raise NotebookAccelError(
            "%accelerate debug asks for commands, and nobody can be asked here: use a frontend "
            "with input fields (JupyterLab, Notebook, VS Code, Colab, a terminal)"
        ) from error
