"""The agent's part in an action of all ranks: it asks its ranks on the scoreboard, and answers.

actions/scoreboard.py has the whole. Nothing here waits: :meth:`Acting.tick` sends each answer
once it is known.
"""

from __future__ import annotations

from collections.abc import Callable

from notebook_accel import wire
from notebook_accel.actions.scoreboard import BY_INTERRUPT, FLAG_SECONDS, STOP, Scoreboard

# A rank has so long to show on the board whether it passed its newest point or waits there; one
# that shows neither counts as having passed.
_PATIENCE_SECONDS = 1.0


class Acting:
    """What an agent and its ranks do for the actions of one call.

    Args:
        relay: passes on what ranks have said by now.
    """

    def __init__(self, board: Scoreboard, post: wire.Post, relay: Callable[[], object]) -> None:
        self._board = board
        self._post = post
        self._relay = relay
        # Of the newest action; the number of the newest pause, 0 if none goes on.
        self._number = 0
        self._pause = 0
        self._is_done = True
        # When an answer was asked for that is not sent yet.
        self._asked_at: float | None = None
        self._goes_on = False
        # The content of a stop that waits until ranks have done what was asked before.
        self._stop: bytes | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the kernel and all ranks wait for an answer."""
        return self._asked_at is not None

    def ask(self, message: wire.Act, *, is_pause: bool, refused: str, now: float) -> None:
        """Ask the ranks for an action, or tell the kernel why this machine cannot do it."""
        self._number = message.number
        if refused:
            self._post(wire.PointReached, number=message.number, refused=refused)
            return
        self._pause = message.number if is_pause else 0
        self._board.ask(message.number, message.content)
        # Of a pause that was withdrawn, in which all ranks here were, the kernel awaits no end.
        self._asked_at, self._is_done, self._goes_on = now, False, False

    def ask_stop(self, now: float, *, interrupts: bool = False) -> None:
        """Ask the ranks to stop: at once, or once they have done what was asked before."""
        self.go_on()
        self._stop = BY_INTERRUPT if interrupts else b""
        self.tick(now)

    def act_at(self, message: wire.ActAt) -> None:
        """Tell the ranks where to do the action, that it is withdrawn, or that a pause is over."""
        if message.number != self._number:  # a stop has been asked here meanwhile
            return
        if message.point == wire.NOWHERE and self._is_done:
            self.go_on()
            return
        self._board.act_at(message.point)
        if message.point == wire.NOWHERE:
            self._board.go_on(message.number)  # a pause that not all ranks have come to
            self._is_done, self._pause = True, 0

    def hold(self, message: wire.Hold, now: float) -> None:
        """Let no rank begin the action of this number, and tell the kernel whether one has."""
        if message.number == self._number and not self._is_done:
            self._board.hold()
            self._asked_at = now
        else:  # it crossed our word that all here have done it: the others' ranks may wait
            did = self._board.has_begun(message.number)
            self._post(wire.PointReached, number=message.number, did=did)

    def go_on(self) -> None:
        if self._pause:
            self._board.go_on(self._pause)
            self._goes_on = True

    def tick(self, now: float) -> None:
        """Send each answer that is known by now, and ask for a stop once it is its turn."""
        if self._asked_at is not None and now >= self._asked_at + FLAG_SECONDS:
            is_patient = now < self._asked_at + _PATIENCE_SECONDS
            passed = self._board.passed(patient=is_patient)
            if passed is not None:
                self._asked_at = None
                # At worst the ranks keep the point that they had, which is correct too.
                did = not is_patient or self._board.has_begun(self._number)
                misses = self._board.misses(self._number)
                self._post(
                    wire.PointReached, number=self._number, passed=passed, did=did, misses=misses
                )
        if not self._is_done and (num_done := self._board.num_done(self._number)) is not None:
            self._is_done = True
            self._relay()  # a knob's new value, say, before the word that all have it
            self._post(wire.ActionDone, number=self._number, num_ranks=num_done)
        if self._goes_on and not self._board.num_paused:
            self._goes_on, self._pause = False, 0
            self._post(wire.PauseEnded)
        # Not before the answer: ranks that have ended are done before it is sent, and the kernel
        # would wait for it, and the other agents' ranks for the kernel.
        if self._stop is not None and self._is_done and self._asked_at is None:
            self._number = STOP
            self._board.ask(STOP, self._stop)
            self._asked_at, self._stop = now, None
