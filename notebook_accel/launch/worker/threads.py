"""Ranks that are threads: a process may have several, as on TPUs whose chips have two cores.

    Host (one per process, in its main thread)    signals, output, patches of libraries
      `-- thread --> HostedRank.serve             context, calls, messages of one rank

Ranks of one process share what a process has once: the environment names its first rank only (RANK,
LOCAL_RANK), output of C code and child processes goes to that rank's log, and if the process dies,
all its ranks die. Each rank has its own messages to the agent, counters, log for what its Python
code prints, and KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from notebook_accel import wire
from notebook_accel.actions.scoreboard import RankRow
from notebook_accel.errors import ConfigError
from notebook_accel.launch.setup import Step
from notebook_accel.launch.worker import exiting, main, streams
from notebook_accel.launch.worker.interrupts import WAKE_SIGNAL, Interrupts
from notebook_accel.private import of_libraries
from notebook_accel.rank import this_rank
from notebook_accel.system import processes


class Host:
    """A process whose threads are ranks; made in its main thread before any rank starts."""

    def __init__(self, parent: int) -> None:
        processes.die_with_parent(parent)
        processes.adopt_orphans()
        processes.reset_signals()
        self._ranks: list[HostedRank] = []
        self._lock = threading.Lock()
        self._exit_code = 0
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(WAKE_SIGNAL, self._interrupt)
        # What came along by fork is not this process's to call.
        of_libraries.forget_exit_functions()

    def serve(self, inherited: main.Inherited, num_here: int, check: Callable[[], None]) -> None:
        """Run the calling thread as a rank until there are no more calls.

        All ranks of the process must call this, each in its own thread: they wait for each other
        before their first call.
        """
        with self._lock:
            if not self._ranks:
                self._begin(inherited)
                self._all_told = threading.Barrier(num_here)
            first = self._ranks[0] if self._ranks else None
            hosted = HostedRank(inherited, first, check, self._all_told)
            self._ranks.append(hosted)
        _logs[inherited.rank] = open(  # noqa: SIM115 - for the life of the process
            inherited.log, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False
        )
        self._exit_code = max(self._exit_code, hosted.serve())

    def finish(self) -> int:
        """Clean up the process (``exiting.finish``); return the highest exit code of its ranks."""
        if self._ranks:
            exiting.finish(self._exit_code, self._ranks[0].context.notice)
        return self._exit_code

    def _begin(self, first: main.Inherited) -> None:
        import torch

        # Before there are other threads: after a fork, torch makes its pool anew when the number is
        # first set, and two threads that set it at once crash.
        torch.set_num_threads(first.launch.num_threads)
        main.name_rank(first)
        streams.redirect(first.log, on_lost=lambda _: None)
        for name in ("stdout", "stderr"):
            stream = _RankStream(getattr(sys, name))
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        main.replace_libraries()
        faulthandler.enable(file=first.stacks, all_threads=False)
        faulthandler.register(main.STACKS_SIGNAL, file=first.stacks, all_threads=True, chain=False)

    def _interrupt(self, _number: int, _frame: Any) -> None:
        for hosted in self._ranks:
            hosted.interrupts.look()


class _ThreadInterrupts(Interrupts):
    """Raises KeyboardInterrupt in a rank's thread, when the main thread has handled a signal.

    Python handles signals in the main thread only, so :class:`Host` calls :meth:`look` there. The
    exception is raised in the rank's thread between two Python instructions; a thread in native
    code gets it when that code returns.
    """

    def __init__(self, row: RankRow) -> None:
        # Reentrant: the thread of a rank may be the one that hears.
        self._changing = threading.RLock()
        super().__init__(row)

    def install(self) -> None:
        """Do nothing: :class:`Host` has installed the signal handlers of the process."""

    def look(self) -> None:
        """Interrupt this rank's thread if the agent asked for it and the rank has not handled it.

        Called in the main thread for every rank of the process, since a signal does not say which
        rank the agent means; the ranks' shared counters do.
        """
        if self._row.interrupted_call == self._call > 0 and not self.has_seen(self._call):
            with self._changing:
                self._on_signal(signal.SIGINT, None)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            # The main thread must not look just before the block begins, and raise within it.
            with self._changing:
                stack.enter_context(super().deferred())
            yield

    def _raise(self) -> None:
        if threading.get_ident() == self._thread:
            raise KeyboardInterrupt
        thread = ctypes.c_ulong(self._thread)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))


class HostedRank(main.Worker):
    """Runs one rank that shares its process with others, in the thread that calls ``serve``."""

    interrupts: _ThreadInterrupts
    _first: HostedRank

    def __init__(
        self,
        inherited: main.Inherited,
        first: HostedRank | None,
        check: Callable[[], None],
        all_told: threading.Barrier,
    ) -> None:
        row = inherited.board.row(inherited.local_rank)
        super().__init__(inherited, _ThreadInterrupts(row), first)
        self._check = check
        self._all_told = all_told
        self._taken_over_for = 0  # the newest call for which it was done

    def _take_over(self, steps: Sequence[Step]) -> None:
        # Once a call: another rank may have drawn from the generators, which they share.
        with _taking_over:
            if self._first._taken_over_for < self.context.call:
                super()._take_over(steps)
                self._first._taken_over_for = self.context.call

    def _enter_call(self, message: wire.BeginCall) -> None:
        super()._enter_call(message)
        if not message.last and self._all_told.parties > 1:
            self._setup_error = ConfigError(
                f"a session needs a process for each rank, and {self._all_told.parties} ranks "
                "share one here, with all names that cells assign: launch a function instead "
                "(notebook_launcher), or take num_processes=1"
            )

    def serve_calls(self) -> int:
        # The function of one may end the process, and with it those that have said nothing yet.
        self._all_told.wait()
        return super().serve_calls()

    def _set_up(self) -> None:
        os.register_at_fork(after_in_child=self._leave_board)
        self._check()


_taking_over = threading.Lock()
# What the Python code of each rank of this process prints into.
_logs: dict[int, io.TextIOWrapper] = {}


class _RankStream:
    """A ``sys.stdout`` of all ranks of this process: each print goes to the log of its rank.

    That is the rank whose thread prints; what is printed in no rank's goes to ``of_process``.
    """

    def __init__(self, of_process: Any) -> None:
        self._of_process = of_process

    def __getattr__(self, name: str) -> Any:
        return getattr(_logs.get(this_rank.current().rank, self._of_process), name)
