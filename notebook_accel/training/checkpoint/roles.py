"""What rank 0 does for one save, and what the others do: where to write, and what comes after.

::

    rank 0:   make the folder ......... all have written: complete, publish, say that it is done
    others:   wait for rank 0's plan .. tell what was written, wait until it is done

A save in the background goes through the same in a thread, once its rank has written.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accel.training.checkpoint import pieces as checkpoint_pieces
from notebook_accel.training.checkpoint.atomic import Partial, publish_folder
from notebook_accel.training.checkpoint.folders import NUMBERED, is_ours
from notebook_accel.training.checkpoint.meeting import describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accel.training.checkpoint.folders import Numbering
    from notebook_accel.training.checkpoint.meeting import Meetings
    from notebook_accel.training.checkpoint.pieces import Piece

__all__ = ["Follow", "Lead", "Role"]

# How long a rank of another machine waits for its folder to appear: a shared disk may be slow.
_FOLDER_SECONDS = 30.0
_CALL = "save_state()"


class Role:
    """One rank's part in one save.

    Attributes:
        final: where the checkpoint will be.
        staged: where it is written.
        is_late: whether rank 0 no longer waited for this rank, whose own files alone are missing.
    """

    final: Path
    staged: Path
    is_late = False

    def open(self) -> None:
        """Make the folder to write in, or wait until it is there."""

    def finish(self, pieces: Sequence[Piece], results: Sequence[Any]) -> None:
        """Take part in publishing what all have written; then the checkpoint is in its place."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank could not write, and remove what it wrote."""
        raise NotImplementedError


class Lead(Role):
    """Rank 0's part.

    Args:
        meetings: with the other ranks.
        asked: the folder that the script named, or nothing.
        numbering: names the folder where the script did not.
        needs_all: whether the save cannot go on without all ranks.
    """

    def __init__(
        self, meetings: Meetings, asked: str, numbering: Numbering, *, needs_all: bool
    ) -> None:
        self._meetings = meetings
        self._numbering = numbering
        self._asked = asked
        self._plan = meetings.lead(asked, self._make_folder, call=_CALL, needs_all=needs_all)
        self.final, self.staged = Path(self._plan.final), Path(self._plan.staged)

    def _make_folder(self) -> tuple[str, str]:
        numbering = self._numbering
        self._partial = (
            Partial.of(Path(self._asked))
            if self._asked
            else Partial(numbering.folder(), NUMBERED.pattern, numbering.next)
        )
        return str(self._partial.final), str(self._partial.path)

    def finish(self, pieces: Sequence[Piece], results: Sequence[Any]) -> None:
        others = self._meetings.wait_for_members(self._plan)
        checkpoint_pieces.complete(pieces, [results, *others])
        self._partial.publish(is_ours=is_ours)
        if not self._asked:
            self._numbering.remove_oldest()
        self._meetings.finish(self._plan)

    def fail(self, error: BaseException) -> None:
        # In this order: a rank that finds the folder gone finds the reason too.
        self._meetings.finish(self._plan, describe(error))
        self._partial.discard()


class Follow(Role):
    """The other ranks' part: they add their files to rank 0's folder."""

    def __init__(self, meetings: Meetings, asked: str) -> None:
        self._meetings = meetings
        self._plan = meetings.follow(asked, call=_CALL)
        self._makes_own = False
        self.final, self.staged = Path(self._plan.final), Path(self._plan.staged)
        self.is_late = meetings.topology.process_index not in self._plan.members

    def open(self) -> None:
        if self.is_late:
            self._meetings.wait_until_done(self._plan)
            return
        here = self._meetings.topology
        if self._plan.staged and here.local_process_index == 0 and not self.staged.exists():
            # This machine does not see rank 0's disk.
            self.staged.mkdir(parents=True)
            self._makes_own = True
            return
        deadline = time.monotonic() + _FOLDER_SECONDS
        while not (self._plan.staged and self.staged.exists()) and time.monotonic() < deadline:
            self._meetings.raise_failure(self._plan)
            time.sleep(0.01)

    def finish(self, pieces: Sequence[Piece], results: Sequence[Any]) -> None:
        self._meetings.report_written(self._plan, results=results)
        if self._makes_own:
            self._meetings.wait_for_members(self._plan)
            publish_folder(self.staged, self.final, is_ours=is_ours)
        self._meetings.wait_until_done(self._plan)

    def fail(self, error: BaseException) -> None:
        self._meetings.report_written(self._plan, describe(error))
        if self._makes_own:
            shutil.rmtree(self.staged, ignore_errors=True)
        # Rank 0 removes the folder when it fails: then this rank's error is a consequence, and
        # rank 0's is raised.
        self._meetings.raise_failure(self._plan)
