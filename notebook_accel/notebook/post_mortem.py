"""``%accelerate debug``: the frames of an error in a rank, by commands typed in the cell.

    cell: input("rank 1 (pdb) ") --DebugCall--> the rank's PostMortem --> text, printed in the cell

The other ranks wait meanwhile; the call that failed is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.error import StdinNotImplementedError

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch.text import wording
from notebook_accel.notebook.worker.calls import DebugCall

if TYPE_CHECKING:
    from notebook_accel.notebook.held_launch import HeldLaunch
    from notebook_accel.notebook.session import NotebookSession

__all__ = ["debug"]


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
