"""What the pool of ranks asks of the call that they are in; :class:`Supervisor` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accel.launch import wire
    from notebook_accel.launch.control.agent_link import LostAgent
    from notebook_accel.launch.control.state import RunState

__all__ = ["RunningCall"]


class RunningCall(Protocol):
    """A call on the ranks of a pool.

    The pool calls ``begin``, then ``take``, ``lose`` and ``tick`` from its thread, and ``finish``
    once, at the end. ``note_stop`` may come from any thread.

    Attributes:
        number: of the call, once it was sent; 0 before.
        state: what is known of it.
    """

    number: int
    state: RunState

    @property
    def is_over(self) -> bool:
        """Whether every rank's part of the call has ended."""

    @property
    def ended_well(self) -> bool:
        """Whether the function returned on every rank, and their process group is whole."""

    def begin(self, number: int) -> None:
        """Note the call's number before it is sent; once more, with 0, if it could not be sent."""

    def take(self, message: wire.Message, fds: Sequence[int]) -> None:
        """Keep what a message brings; its descriptors are the call's from now on."""

    def lose(self, ranks: Sequence[int]) -> None:
        """The agent of these ranks is gone, and they are with it."""

    def tick(self) -> None:
        """Look at the clock, and draw if that is due."""

    def note_stop(self) -> bool:
        """Note that somebody wants the end; False where the call has ended already."""

    def finish(self, lost: Sequence[LostAgent]) -> None:
        """The call has ended: decide what came of it and let everybody know.

        Args:
            lost: the agents that ended before their ranks had.
        """
