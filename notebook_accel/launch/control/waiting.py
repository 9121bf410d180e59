"""In place of ranks that cannot start yet, since other machines or room in a cluster are awaited.

RankCall --is sent to--> WaitingPool, whose thread has the engine wait
machines are there: the call is sent to their RankPool, as after a restart
stopped, or they do not come: the call ends
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from notebook_accel.launch.control.call import RankCall
from notebook_accel.launch.control.pool import RankPool
from notebook_accel.launch.control.run_state import ProcessState


class _StoppedError(Exception):
    """Ends the engine's wait: the run was stopped."""


class WaitingPool(RankPool):
    """What the call of a run is sent to while the machines of its ranks are awaited."""

    is_awaited = True

    def __init__(
        self, start: Callable[[WaitingPool], RankPool], world_size: int, *, run: str, grace: float
    ) -> None:
        self.run, self.grace = run, grace
        self.processes = tuple(ProcessState(rank=rank) for rank in range(world_size))
        self._links = []
        self._turn = threading.Lock()
        self._start = start
        self._is_stopped = False
        self._thread = threading.Thread(target=self._await, name=f"waits-{run}", daemon=True)

    def check_free(self) -> None:
        return

    def send_call(self, call: Any, *_: object) -> None:
        self.late_call: RankCall = call
        call.begin(1)

    def poll(self) -> None:
        self.late_call.tick()
        if self._is_stopped:
            raise _StoppedError

    def _await(self) -> None:
        with self._turn:  # until the run is listed and shown
            call = self.late_call
        try:
            call.move_to(self._start(self))
        except _StoppedError:
            call.end_unstarted("")
        except Exception as error:  # in the only thread that can end the call
            call.end_unstarted(str(error) or type(error).__name__)

    def kill(self, *_: Any, **_asked: Any) -> None:
        self._is_stopped = True

    ask_end = kill

    def stacks(self, rank: int | None = None) -> list[tuple[int, str]]:
        return []
