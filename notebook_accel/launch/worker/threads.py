"""Ranks that are threads: a process may have several, as on TPUs whose chips have two cores.

    Host (one a process, in its main thread)      signals, output, what libraries do in a rank
      `-- thread --> HostedRank.serve             context, calls, messages of one rank

What belongs to a process is shared: its environment names its first rank, C code and children print
into that rank's file, and if the process dies all its ranks do. A rank's own are its messages, its
counters, what its Python code prints, and its KeyboardInterrupt.
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
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError
from notebook_accel.launch import rank
from notebook_accel.launch.system import processes
from notebook_accel.launch.worker import exiting, output, standard_input
from notebook_accel.launch.worker.interrupts import WAKE_SIGNAL, Interrupts
from notebook_accel.launch.worker.main import (
    STACKS_SIGNAL,
    Inherited,
    Worker,
    enter_notebook,
    name_rank,
    replace_libraries,
)
from notebook_accel.private import of_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_accel.launch import wire
    from notebook_accel.launch.transport.scoreboard import RankRow

__all__ = ["Host"]


class Host:
    """A process with ranks as threads, made in its main thread before any of them begins.

    Args:
        parent: process with whose end this one ends.
    """

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
        of_python.forget_exit_functions()

    def serve(self, inherited: Inherited, num_here: int, check: Callable[[], None]) -> None:
        """Be a rank, in this thread, until there are no more calls.

        Args:
            inherited: of the rank.
            num_here: number of ranks of this process.
            check: looks at the device once the rank can tell of what it raises.
        """
        with self._lock:
            if not self._ranks:
                self._begin(inherited)
                self._all_told = threading.Barrier(num_here)
            first = self._ranks[0] if self._ranks else None
            hosted = HostedRank(inherited, first, check, self._all_told)
            self._ranks.append(hosted)
        _streams.add(inherited.spec.rank, inherited.log)
        self._exit_code = max(self._exit_code, hosted.serve())

    def finish(self) -> int:
        """Run the exit functions once all ranks here have ended; return the exit code."""
        if self._ranks:
            exiting.finish(self._exit_code, self._ranks[0].context.notice)
        return self._exit_code

    def _begin(self, first: Inherited) -> None:
        """Make this process that of ranks."""
        # Once more after the fork, which has seeded Python's random numbers anew.
        enter_notebook(first.launch)
        name_rank(first)
        output.redirect(first.log, on_lost=lambda _: None)
        _streams.install()
        standard_input.install()
        replace_libraries()
        faulthandler.register(STACKS_SIGNAL, file=first.stacks, all_threads=True, chain=False)

    def _interrupt(self, _number: int, _frame: Any) -> None:
        for hosted in self._ranks:
            hosted.interrupts.look()


class _ThreadInterrupts(Interrupts):
    """Raises in the thread of a rank what the main thread of its process hears of.

    Python raises it there between two instructions: a rank in native code sees it at the end of
    that.
    """

    def __init__(self, row: RankRow) -> None:
        # Reentrant: the thread of a rank may be the one that hears.
        self._changing = threading.RLock()
        super().__init__(row)

    def install(self) -> None:
        """Do nothing: signals come to the process."""

    def look(self) -> None:
        """Interrupt this rank's thread, if the agent asked for it and it has not seen that."""
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


class HostedRank(Worker):
    """A rank that shares its process with others, and may be any thread of it.

    Args:
        inherited: of the rank.
        first: the rank that came first in this process; None for that one itself.
        check: raises what is wrong with the rank's device.
        all_told: where ranks of this process wait until all have said that they are in it.
    """

    interrupts: _ThreadInterrupts

    def __init__(
        self,
        inherited: Inherited,
        first: HostedRank | None,
        check: Callable[[], None],
        all_told: threading.Barrier,
    ) -> None:
        row = inherited.board.row(inherited.spec.local_rank)
        super().__init__(inherited, _ThreadInterrupts(row))
        self._first = first
        self._check = check
        self._all_told = all_told

    def _enter(self) -> None:
        # Threads of the user's have no context of a rank: they get the first one's.
        rank.enter(self.context, whole_process=self._first is None)

    def _where(self) -> dict[str, int]:
        return {"pid": os.getpid(), "host": (self._first or self).context.rank}

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


class _RankStreams:
    """``sys.stdout`` and ``sys.stderr`` that write into the file of the rank that prints."""

    def __init__(self) -> None:
        self._of_rank: dict[int, io.TextIOWrapper] = {}

    def add(self, number: int, fd: int) -> None:
        """Write what Python code of this rank prints to the descriptor ``fd``."""
        file = open(fd, "wb", closefd=False)  # noqa: SIM115 - for the life of the process
        self._of_rank[number] = io.TextIOWrapper(
            file, "utf-8", errors="replace", line_buffering=True
        )

    def install(self) -> None:
        """Replace ``sys.stdout`` and ``sys.stderr`` by streams that write to each rank's file."""
        for name in ("stdout", "stderr"):
            stream = _RankStream(self._of_rank, getattr(sys, name))
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class _RankStream:
    def __init__(self, of_rank: dict[int, io.TextIOWrapper], of_process: Any) -> None:
        self._of_rank = of_rank
        self._of_process = of_process

    def __getattr__(self, name: str) -> Any:
        here = rank.current()
        return getattr(self._of_rank.get(here.rank, self._of_process), name)


_streams = _RankStreams()
