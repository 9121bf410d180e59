"""Errors as a cell shows them, without the frames of this package, and ``%accelerate debug``.

The sources of the notebook's cells are sent to the ranks with each launch, so that tracebacks can
quote them. IPython asks an exception for ``_render_traceback_`` and shows the lines that it returns
in place of a traceback. ``NotebookAccelError`` has that method. A ``KeyboardInterrupt`` or
``TimeoutError`` of a run is given that method here.

    launch_for_debugger --> ranks, one call --> a rank raised: the ranks wait <-- %accelerate debug
                                            --> the call ended otherwise: the ranks end
    cell: input("rank 1 (pdb) ") --DebugCall--> pdb in the rank --> text, printed in the cell

With ``notebook_launcher(..., debug=True)`` the ranks stay alive after one of them raised: the
launch is held. At most one launch is held at a time. Its ranks, and their memory on devices, are
freed when the user leaves the debugger (q), with the next launch or ``%%accelerate`` cell, with
``%accelerate stop``, and when the kernel ends.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from IPython.core.error import StdinNotImplementedError
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from notebook_accel.errors import NotebookAccelError, WorkerError
from notebook_accel.launch import run_list
from notebook_accel.launch.control.run_state import Failure
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.launcher import Session
from notebook_accel.launch.payload.cells import CellSource
from notebook_accel.launch.run import Run
from notebook_accel.launch.text import wording
from notebook_accel.launch.view import GuardedView
from notebook_accel.notebook.clicks import can_answer, find_kernel
from notebook_accel.notebook.worker import DebugAnswer, DebugCall

# Folders and files between a cell and what raised: this package, and what calls it for a magic.
_INNER = {"notebook_accel", "IPython", "decorator.py", "contextlib.py"}
# Of a long session only the newest cells travel with each launch.
_MAX_CHARACTERS = 1_000_000


def cell_sources(shell: InteractiveShell | None) -> list[CellSource]:
    """Return cells, newest first, a million characters in all; [] for no shell."""
    if shell is None:
        return []
    # The numbers of cells by the file names of their code.
    names = list(linecache.cache)
    label: Any = getattr(shell.compile, "format_code_name", None)
    if label is not None:
        labels = {name: label(name) for name in names}
        # ("Cell", "In[3]"), and nothing of what is no cell
        numbers = {name: int(said[1][3:-1]) for name, said in labels.items() if said}
    else:  # IPython 7 has no labels: its history says which cell had which text.
        cells = enumerate(shell.user_ns.get("In", ()))
        history = {text.rstrip(): number for number, text in cells if text.strip()}
        texts = {name: "".join(linecache.getlines(name)).rstrip() for name in names}
        numbers = {name: history[text] for name, text in texts.items() if text in history}
    newest = sorted(numbers, key=lambda filename: numbers[filename], reverse=True)
    found: list[CellSource] = []
    room = _MAX_CHARACTERS
    for filename in newest:
        text = "".join(linecache.getlines(filename))
        room -= len(text)
        if room < 0:
            break
        found.append(CellSource(filename, f"Cell In[{numbers[filename]}]", text))
    return found


@contextmanager
def show_in_short() -> Iterator[None]:
    """Have IPython show errors of this package and interrupts or timeouts of a run in a few lines.

    The error is raised with its full traceback, for ``sys.last_value`` and ``%debug``.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        run = getattr(error, "run", None)
        if isinstance(error, NotebookAccelError):
            error.cell_names = {cell.filename: cell.label for cell in cell_sources(get_ipython())}
        elif isinstance(error, (KeyboardInterrupt, TimeoutError)) and run is not None:
            text = str(error) or "the run was interrupted"
            # Where training is kept, the summary or the error says the same of that.
            kept = f"; the run is kept: {run_list.expression_now(run.id)}"
            _show_as(error, text if run.state.has_rescued else text + kept)
        elif isinstance(error, KeyboardInterrupt):
            _show_as(error, "interrupted before a run began")
        _lead_debugger(error)
        raise


def _show_as(error: BaseException, text: str) -> None:
    first = f"\x1b[0;31m{type(error).__name__}\x1b[0m: {text}"
    error._render_traceback_ = lambda: [first]  # type: ignore[attr-defined]


def _lead_debugger(error: BaseException) -> None:
    """Have ``%debug`` open the user's frame that called us, or what an inline run raised."""
    formatter = getattr(get_ipython(), "InteractiveTB", None)
    if formatter is None:
        return
    formatter.tb = None
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    frame: FrameType | None = innermost if _is_inner(innermost) else None
    while frame is not None and _is_inner(frame):
        frame = frame.f_back
    while frame is not None:
        formatter.tb = TracebackType(formatter.tb, frame, frame.f_lasti, frame.f_lineno)
        # %debug skips the outermost, which is IPython's own.
        frame = None if _is_inner(frame) else frame.f_back


def _is_inner(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return not _INNER.isdisjoint(path.parts)


# ---- %accelerate debug --------------------------------------------------------------------

_HINT = (
    "`%accelerate debug` looks into its frames; the ranks wait for that until the next launch or "
    "`%accelerate stop`"
)

HINT_TO_DEBUG = "To look into its frames: launch with debug=True, then `%accelerate debug`"

_held: tuple[Session, Run] | None = None


def held_launch() -> tuple[Session, Run] | None:
    """Return the ranks that wait for a debugger, and the launch that failed; None for none."""
    return _held


def end_held_launch() -> bool:
    """End the ranks that wait for a debugger; return whether there were any."""
    global _held
    held, _held = _held, None
    if held is not None:
        held[0].close()
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
    _held = session, run
    return True


def debug(
    ask: Callable[[DebugCall], list[DebugAnswer | None]],
    rank: int | None,
    failure: Callable[[], Failure | None],
) -> None:
    """Read pdb commands from the user and run them in a rank that has an error, until they quit.

    Args:
        ask: returns an answer a rank; None from one without an error, and from those not asked.
        rank: None is the rank at fault, or else the first one with an error.
        failure: asked after the first answers: the one that was first; None if none is known.

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
        first = failure()
        rank = failed[0] if first is None or first.rank not in failed else first.rank
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
