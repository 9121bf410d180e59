"""The kernel's part in an action of all ranks: one after the other, each at one common point.

    in line -> ASKED -all agents answer-> POINT -all ranks did it-> done, the next
                                          POINT -30 s-> HELD -some rank did it-> POINT, no limit
                                                        HELD -no rank did-> withdrawn, the next
                                                        HELD -a pause, not by all-> withdrawn

A stop has its answers and its point as an action has. The agents ask their ranks for it once these
have done what was asked before. actions/scoreboard.py has the whole.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import msgspec

from notebook_accel import wire
from notebook_accel.actions.scoreboard import MAX_CONTENT, STOP, leave_after, meet_after
from notebook_accel.system.interrupts import held

# So long an action may wait for ranks to come to its point.
POINT_SECONDS = 30.0
_BEING_STOPPED = "the run is being stopped"

# An agent is known by the numbers of its ranks.
Agent = tuple[int, ...]


@dataclass(kw_only=True)
class _Asked:
    """An action that was asked for; ``answers`` are of the question asked last.

    One that ``stays`` is asked for again where the ranks come to no point: nobody waits for it.
    """

    action: wire.Action
    stays: bool = False
    done: Future[None] = field(default_factory=Future)
    number: int = 0
    point: wire.Point | None = None
    due: float = math.inf
    is_held: bool = False
    answers: dict[Agent, Any] = field(default_factory=dict)
    num_did: dict[Agent, int] = field(default_factory=dict)


class CommonActions:
    """The actions of one call. All methods return at once, and may be called in any thread.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        send: wire.Post,
        agents: Callable[[], Iterable[Agent]],
        on_pause: Callable[[bool], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._agents = agents
        self._on_pause = on_pause
        self._clock = clock
        self._lock = threading.RLock()
        self._line: list[_Asked] = []
        self._number = 0
        self._stop_answers: dict[Agent, wire.Passed] = {}
        self._is_stopping = False
        self._why_ended = ""
        # The pause in which all ranks are; who waits for its end, and which agents have said it.
        self._pause = 0
        self._pause_over: Future[None] | None = None
        self._back: set[Agent] = set()

    # ---- what anybody asks -------------------------------------------------------------------

    def ask(self, action: wire.Action, *, stays: bool = False) -> Future[None]:
        """Have all ranks do an action, once it is its turn; the future says when they have.

        New values of knobs that wait for their turn are replaced by newer ones. Those that ``stay``
        wait for a point for as long as the call lasts.
        """
        with held(), self._lock:
            if self._why_ended:
                return ended(RuntimeError(self._why_ended))
            if self._is_stopping:  # agents have one action at a time: it would replace the stop
                return ended(RuntimeError(_BEING_STOPPED))
            if not [*self._agents()]:
                return ended(RuntimeError(f"{action.kind}: no rank runs yet"))
            if self._pause and self._pause_over is None and action.kind != "set":
                return ended(_while_paused(action))
            last = self._line[-1] if self._line else None
            is_set = action.kind == "set"
            if last is not None and is_set and last.action.kind == "set" and not last.number:
                last.action = wire.Action(
                    kind="set", values={**last.action.values, **action.values}
                )
                last.stays &= stays
                return last.done
            asked = _Asked(action=action, stays=stays)
            self._line.append(asked)
            self._ask_first()
            return asked.done

    def go_on(self) -> Future[None]:
        """End the pause; the future says when all ranks train again."""
        with held(), self._lock:
            if self._why_ended:
                return ended(RuntimeError(self._why_ended))
            coming = next((one for one in self._line if one.action.kind == "pause"), None)
            if not self._pause and coming is not None:
                # Whoever no longer waits for a pause, after an interrupt, must not be left in it.
                over: Future[None] = Future()
                coming.done.add_done_callback(
                    lambda _: self.go_on().add_done_callback(
                        lambda done: _end(over, done.exception())
                    )
                )
                return over
            if not self._pause:
                return ended(None)
            if self._pause_over is None:
                self._pause_over = Future()
                self._send(wire.ActAt, number=self._pause, point=wire.NOWHERE)
            return self._pause_over

    def note_stop(self) -> None:
        """Take no further action: the call is being stopped."""
        with held(), self._lock:
            self._is_stopping = True
            waiting = [one for one in self._line if not one.number]
            self._line = [one for one in self._line if one.number]
            for asked in waiting:
                _end(asked.done, RuntimeError(_BEING_STOPPED))

    # ---- what the pool tells ------------------------------------------------------------------

    def take(self, agent: Agent, message: wire.Message) -> None:
        with self._lock:
            if isinstance(message, wire.PointReached) and message.number == STOP:
                self._stop_answers[agent] = message.passed
            elif isinstance(message, wire.PauseEnded):
                self._back.add(agent)
            elif self._line and getattr(message, "number", 0) == self._line[0].number:
                first = self._line[0]
                if isinstance(message, wire.ActionDone):
                    first.num_did[agent] = message.num_ranks
                elif isinstance(message, wire.PointReached):
                    first.answers[agent] = message
            self.look()

    def look(self) -> None:
        """Go on as far as the answers of the agents allow; called also once an agent is lost."""
        with self._lock:
            agents = set(self._agents())
            if agents and agents <= self._stop_answers.keys():
                point = leave_after(self._stop_answers[agent] for agent in agents)
                self._stop_answers = {}
                self._send(wire.ActAt, number=STOP, point=point)
            if self._pause and agents <= self._back:
                self._pause = 0
                self._on_pause(False)
                over, self._pause_over = self._pause_over, None
                if over is not None:
                    _end(over)
                self._ask_first()
            if self._line and self._line[0].number and agents:
                self._follow(self._line[0], agents)

    def end(self, why: str) -> None:
        with self._lock:
            self._why_ended = why
            if self._pause:  # an interrupt or a failure has ended it
                self._pause = 0
                self._on_pause(False)
            waiting, self._line = self._line, []
            for asked in waiting:
                _end(asked.done, RuntimeError(why))
            if self._pause_over is not None:
                _end(self._pause_over)

    # ---- one after the other ------------------------------------------------------------------

    def _ask_first(self) -> None:
        """Ask for the first action in line, unless that was done, or ranks are paused."""
        if not self._line or self._line[0].number or self._pause:
            return
        first = self._line[0]
        self._number += 1
        first.number = self._number
        content = msgspec.msgpack.encode(first.action)
        if len(content) > MAX_CONTENT:
            text = f"{len(content)} bytes of knobs' values: at most {MAX_CONTENT} at a time"
            self._finish_first(ValueError(text))
            return
        self._send(wire.Act, number=first.number, content=content)

    def _follow(self, first: _Asked, agents: set[Agent]) -> None:
        if agents <= first.num_did.keys():
            did = sum(first.num_did.values())
            if did and first.action.kind == "pause" and not self._is_stopping:
                self._pause, self._back = first.number, set()
                self._on_pause(True)
                # Who asked for these meanwhile would wait until the training goes on.
                waiting, self._line = self._line[1:], self._line[:1]
                for asked in waiting:
                    if asked.action.kind == "set":
                        self._line.append(asked)
                    else:
                        _end(asked.done, _while_paused(asked.action))
            ended = RuntimeError(
                "the function ended, or failed, before all ranks had done it; run.wait() says which"
            )
            self._finish_first(None if did else ended)
        elif not agents <= first.answers.keys():
            if first.point is not None and not first.is_held and self._clock() >= first.due:
                first.is_held, first.answers = True, {}
                self._send(wire.Hold, number=first.number)
        elif first.is_held:
            first.is_held = False
            did = any(first.answers[agent].did for agent in agents)
            misses = any(first.answers[agent].misses for agent in agents)
            # Ranks leave a pause again to which not all have come.
            if did and not (misses and first.action.kind == "pause"):
                first.due = math.inf
                self._act_at(first, first.point or wire.NOWHERE)
            else:
                text = (
                    f"{first.action.kind}: the ranks did not come to a common point within "
                    f"{POINT_SECONDS:g} s: points are batches of prepared loaders, steps of "
                    "optimizers, or reads of accelerator.should_stop or should_save. Nothing was "
                    "changed, and the training goes on"
                )
                self._withdraw(first, TimeoutError(text))
        elif refused := [one.refused for one in first.answers.values() if one.refused]:
            self._withdraw(first, RuntimeError(refused[0]))
        else:
            point = meet_after(first.answers[agent].passed for agent in agents)
            first.point, first.due = point, self._clock() + POINT_SECONDS
            self._act_at(first, point)

    def _act_at(self, first: _Asked, point: wire.Point) -> None:
        first.answers = {}
        self._send(wire.ActAt, number=first.number, point=point)

    def _withdraw(self, first: _Asked, error: Exception) -> None:
        self._act_at(first, wire.NOWHERE)
        if not first.stays or not isinstance(error, TimeoutError):
            return self._finish_first(error)
        # After what waits; newer values count.
        again = _Asked(action=first.action, done=first.done, stays=True)
        self._line = [*self._line[1:], again]
        newer = next(one for one in self._line if one.action.kind == "set")
        if newer is not again:
            values = {**first.action.values, **newer.action.values}
            newer.action = wire.Action(kind="set", values=values)
            self._line.pop()
        return self._ask_first()

    def _finish_first(self, error: Exception | None) -> None:
        done = self._line.pop(0).done
        _end(done, error)
        self._ask_first()


def _end(future: Future[None], error: BaseException | None = None) -> None:
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def ended(error: Exception | None) -> Future[None]:
    """Return a future that is done, or has failed with ``error``."""
    future: Future[None] = Future()
    _end(future, error)
    return future


def _while_paused(action: wire.Action) -> Exception | None:
    if action.kind == "pause":
        return None
    return RuntimeError(f"{action.kind}: the run is paused; call run.go_on() first")
