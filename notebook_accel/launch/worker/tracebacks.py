"""Formats an exception of the user's function: its text, exit code, and traceback in user code."""

from __future__ import annotations

import linecache
import traceback
from types import TracebackType


def exit_code(error: SystemExit) -> int:
    """Return the exit code of a process for this ``sys.exit(...)``: never 0 for a failure.

    For an ``int`` it is the lowest eight bits, which is all that the system keeps, but 1 for 256,
    512 and so on. For None it is 0. For any other value it is 1, since Python prints the value as
    an error text; this includes 0.0 and NumPy numbers.
    """
    if error.code is None:
        return 0
    if not isinstance(error.code, int):
        return 1
    # The system keeps eight bits: 256 would be a success.
    return int(error.code) & 0xFF or int(error.code != 0)


# What a notebook shows of one error: an exception may quote a whole data set.
_MAX_CHARACTERS = 50_000


def format_error(error: BaseException, *, caller: str) -> str:
    """Return the exception with its traceback and causes as text, from the user's code on."""
    # A module that was edited meanwhile shows the lines that it has now.
    linecache.checkcache()
    entry = users_frames(error, caller=caller)
    try:
        return "".join(traceback.format_exception(type(error), error, entry))
    except (Exception, SystemExit):  # a user's __str__ may raise anything
        return "".join([*traceback.format_tb(entry), f"{type(error).__name__}\n"])


def users_frames(error: BaseException, *, caller: str = "") -> TracebackType | None:
    """Return the exception's traceback without the frames at its top that are not user code.

    Those are frames of the file ``caller``, and frames marked by ``__tracebackhide__``. If there
    are no other frames, the traceback is returned in full.

    Args:
        caller: path of the package's file that called the user's function; "" for none.
    """
    entry = error.__traceback__
    while entry is not None and (
        entry.tb_frame.f_code.co_filename == caller
        # IPython and pytest hide frames by it; IPython's own between a cell and ours have it.
        or "__tracebackhide__" in entry.tb_frame.f_locals
    ):
        entry = entry.tb_next
    # An error of ours alone, as one that says what cannot be returned, keeps its frames.
    return entry or error.__traceback__


def error_text(error: BaseException) -> str:
    """Return ``str(error)``, or a text in its place if the class's ``__str__`` raises."""
    try:
        return str(error)
    except (Exception, SystemExit) as broken:  # a user's __str__ may raise anything
        return f"<its text could not be made: {type(broken).__name__}>"


def shorten(text: str) -> str:
    """Return a text; if longer than 50,000 characters, with a line in place of its middle."""
    left_out = len(text) - _MAX_CHARACTERS
    if left_out <= 0:
        return text
    half = _MAX_CHARACTERS // 2
    return f"{text[:half]}\n… {left_out:,} characters left out …\n{text[-half:]}"
