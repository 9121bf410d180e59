"""Which lines of a rank's output a view has not shown yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accel.launch.control.state import RankState

__all__ = ["LineReader", "NewLines"]


@dataclass(frozen=True)
class NewLines:
    """Lines that were printed since the last read.

    Attributes:
        lines: those of them that are at hand.
        num_missing: how many came before ``lines`` that only the rank's file has.
    """

    lines: tuple[str, ...] = ()
    num_missing: int = 0

    def newest(self, number: int) -> NewLines:
        """At most ``number`` of the lines, the newest; the others count as missing."""
        lines = self.lines[-number:] if number else ()
        return NewLines(lines, self.num_missing + len(self.lines) - len(lines))

    def followed_by(self, later: NewLines) -> NewLines:
        """These lines and later ones; only the later ones, where some between them are missing."""
        kept = self.newest(0) if later.num_missing else self
        return NewLines((*kept.lines, *later.lines), kept.num_missing + later.num_missing)


class LineReader:
    """Reads the output of one rank from its states, each line once."""

    def __init__(self) -> None:
        self._num_read = 0
        self._has_read_open_line = False

    def read(self, rank: RankState, *, last: bool = False) -> NewLines:
        """The lines since the last read.

        A line that has no end yet is left for later, unless this is the ``last`` read.
        """
        ended = rank.tail[:-1] if rank.open_line else rank.tail
        num_new = rank.num_lines - self._num_read
        lines = ended[-num_new:] if num_new else ()
        self._num_read = rank.num_lines
        missing = num_new - len(lines)
        if last and rank.open_line and not self._has_read_open_line:
            self._has_read_open_line = True
            lines = (*lines, rank.tail[-1])
        return NewLines(lines, missing)
