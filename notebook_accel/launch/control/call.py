"""In the kernel: one call of a function, as the handle of its run knows it.

    Run (run.py) --asks--> Call
                             RankCall      on ranks of a pool (rank_call.py)
                             InlineCall    in the notebook's own process (engines/inline.py)
                             AttachedCall  conducted by a keeper process (detached.py)
                             PastCall      another kernel's, as it is on disk (run_list.py)

A call is the one record of what goes on; everything else that is told of it comes from here. A
:class:`NewCall` is what the launcher has made for it before there are ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from notebook_accel.launch.system.interrupts import Latch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_accel.config import LaunchConfig
    from notebook_accel.launch.control.curves import LiveCurves
    from notebook_accel.launch.control.metrics_file import MetricReader, MetricStore
    from notebook_accel.launch.control.results import Results
    from notebook_accel.launch.control.run_folder import RunFolder
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.system.interrupts import Presses

__all__ = ["Call", "CallView", "NewCall"]

# Between two looks at the person's interrupts; a view's ``poll`` is called as often.
_SLICE_SECONDS = 0.05


class CallView(Protocol):
    """What is asked of the view that shows a run: a ``View`` of ``view/__init__.py``."""

    def poll(self) -> None: ...
    def stop_waiting(self) -> None: ...
    def print_end(self) -> None: ...
    def reopen(self, run: Any) -> None: ...
    def show_displays(self, run: Any, rank: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class NewCall:
    """A call before there are ranks for it.

    Attributes:
        state: before anything of the call exists.
        folder: of its logs and metrics.
        metrics: where they are written.
        handle: gives what a person types for the run.
        open: lists the run of the call, and shows it: somebody conducts it from now on.
    """

    state: RunState
    folder: RunFolder
    metrics: MetricStore
    handle: Callable[[], str]
    open: Callable[[Call], None]


class Call:
    """One call, and who conducts it.

    Attributes:
        state: the newest state.
        config: how it was launched.
        folder: of its logs.
        metrics: what was given to ``accelerator.log``.
        view: shows it.
        results: what the ranks return; None once the call has ended, when only handles have it.
        handle: gives what a person types for the run now: a launch that raised gave nobody its
            handle.
        ended: set once the call has ended and the view has drawn its end.
        timeout: seconds after which the call is ended; None for never.
        timed_out: whether that has ended it.
        curves: its metrics while it goes on; None where nobody collects them.
        number: among the calls of its ranks; 0 before it was sent.
        rescued_as: what a person types for what was being trained when it was stopped; "" where
            nothing of it is kept.
    """

    curves: LiveCurves | None = None
    timeout: float | None = None
    timed_out = False
    number = 0
    rescued_as = ""

    def __init__(
        self,
        state: RunState,
        *,
        config: LaunchConfig,
        folder: RunFolder,
        metrics: MetricReader,
        view: CallView,
        results: Results | None = None,
        handle: Callable[[], str] = lambda: "",
    ) -> None:
        self.state = state
        self.config = config
        self.folder = folder
        self.metrics = metrics
        self.view = view
        self.results = results
        self.handle = handle
        self.ended = Latch()

    # ---- the end -----------------------------------------------------------------------------

    def check_waiting(self) -> None:
        """Refuse to wait for an end of which this process will never hear.

        Raises:
            NotebookAccelError: the call goes on in another process.
        """

    def wait(self, timeout: float | None = None, presses: Sequence[Presses] = ()) -> bool:
        """Wait for the end; False where it has not come within ``timeout`` seconds.

        Args:
            timeout: seconds; None for no limit.
            presses: the person's interrupts, which are passed on to the ranks.
        """
        self.check_waiting()
        deadline = None if timeout is None else time.monotonic() + timeout
        num_passed_on = 0
        # In short slices: signals and the view get their turn.
        try:
            while not self.ended.wait(_SLICE_SECONDS):
                self.view.poll()
                if num_passed_on < sum(one.count for one in presses):
                    num_passed_on += 1
                    self.press(num_passed_on)
                # Where it has ended just now, the end is still to be printed.
                is_late = deadline is not None and time.monotonic() >= deadline
                if is_late and not self.ended.is_set():
                    return False
        finally:
            self.view.stop_waiting()
        self.view.print_end()
        return True

    def stop(self, grace: float | None = None) -> None:
        """Ask the ranks to leave."""

    def press(self, number: int) -> None:
        """The person interrupted once more: 1 interrupts, 2 terminates, 3 kills."""

    def kill(self) -> None:
        """End the ranks now."""

    # ---- what it leaves ----------------------------------------------------------------------

    def stacks(self, rank: int | None = None) -> str:
        """Where the ranks' Python stands."""
        return ""

    def logs(self, rank: int | None = None, max_bytes: int | None = None) -> str:
        """What one rank printed, or all ranks with a label on each line.

        Args:
            rank: None for all.
            max_bytes: only so much of the end; None for everything.
        """
        if rank is not None:
            return self._log(rank, max_bytes)
        ranks = range(self.state.world_size)
        share = None if max_bytes is None else max_bytes // len(ranks)
        return "".join(_labelled(one, self._log(one, share)) for one in ranks)

    def _log(self, rank: int, max_bytes: int | None) -> str:
        part = self.state.ranks[rank]
        first = part.log_start or 0
        if max_bytes is None:
            # The files of a session have what its other calls printed, too.
            whole = (first, part.log_end) if self.state.session else ()
            return self.folder.read_log(rank, *whole)
        start = max(first, part.log_end - max_bytes)
        text = self.folder.read_log(rank, start, part.log_end)
        # The text most likely begins in mid-line, so it is shown from the next line on, if there is
        # one.
        return text if start == first else text.partition("\n")[2] or text


def _labelled(rank: int, text: str) -> str:
    """The output of a rank with its number on each line."""
    # Not splitlines(): a form feed ends no line.
    lines = text.removesuffix("\n").split("\n") if text else []
    return "".join(f"[rank {rank}] {line}\n" for line in lines)
