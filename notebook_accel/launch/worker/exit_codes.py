"""What ``sys.exit(...)`` in the user's function means."""

from __future__ import annotations

__all__ = ["exit_code"]


def exit_code(error: SystemExit) -> int:
    """The exit code of a process that this ends; 0 is success.

    Of what is no ``int``, 0.0 and numbers of numpy included, Python prints the text, and the code
    is 1.
    """
    if error.code is None:
        return 0
    if not isinstance(error.code, int):
        return 1
    # The system keeps eight bits: 256 would be a success.
    return int(error.code) & 0xFF or int(error.code != 0)
