"""Who this rank is, how it reports, and how it learns of a stop.

By this module the ``training`` package talks to whatever has launched it.

Code that trains asks :func:`current` and never cares who started the process. Under our
launcher the answer is a :class:`LaunchedContext`; anywhere else (plain Python, torchrun, a
notebook's kernel) it is a :class:`RankContext`, which knows what the environment says and drops
every report.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from notebook_accel.errors import ConfigError, RunStopped
from notebook_accel.launch import wire

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from notebook_accel.launch.transport.scoreboard import Scoreboard

__all__ = [
    "KeptError",
    "LaunchedContext",
    "RankContext",
    "StorePort",
    "current",
    "enter",
    "has_context",
    "has_process_group",
]

# Between two questions for the memory of a device: at each step it would slow the loop down.
_MEMORY_SECONDS = 1.0


class StorePort(NamedTuple):
    """Address of the store of this run's process groups, reserved before any rank began.

    Attributes:
        host, port: of the store.
        listener: in rank 0, the bound socket on which its store listens; None elsewhere.
    """

    host: str
    port: int
    listener: socket.socket | None


class Training(Protocol):
    """Interface of an object that can hand out its training state, to be saved after a stop."""

    def parts_to_rescue(self, num_steps: int) -> Iterator[object]:
        """Yield this rank's part of the training state in several forms, the best first.

        The first form that can be pickled is kept.
        """


@dataclass
class KeptError:
    """An error that is kept in its rank for a debugger, with the frames that raised it.

    Attributes:
        error: what a call raised.
        debugger: the one that looks into it, kept between questions so that it stays in the frame
            to which the person moved; None until somebody asks.
    """

    error: BaseException
    debugger: Any = None


class RankContext:
    """Context of a rank whose reports go nowhere: a single process, or one under torchrun.

    Attributes:
        rank, local_rank: of this rank; world_size, local_world_size: number of ranks, of all
            machines and of this one.
        device_index: of its accelerator among those that it sees: ``device``, else ``local_rank``.
        shared: what the state classes of ``training`` keep for this rank; they are views of it.
        launched: whether notebook_accel started this rank.
        call: number of the call that the ranks serve; it is the same on all of them.
        before_return: functions to call after the function of the call has returned (or left by
            ``RunStopped`` or ``sys.exit(0)``), and before the rank says so; the key of each is
            the object that asked for it.
        kept_error: what the newest call raised, of those that keep it (``keeps_error`` of
            ``wire.BeginCall``).
        store_port: where the ranks of one machine meet; None leaves it to MASTER_ADDR and
            MASTER_PORT.
    """

    launched = False
    call = 0
    kept_error: KeptError | None = None
    store_port: StorePort | None = None

    def __init__(
        self,
        *,
        rank: int,
        local_rank: int,
        world_size: int,
        local_world_size: int,
        device: int | None = None,
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.local_world_size = local_world_size
        self.device_index = local_rank if device is None else device
        self.shared: dict[Any, Any] = {}
        self.before_return: dict[Any, Callable[[], None]] = {}

    @classmethod
    def from_environment(cls) -> RankContext:
        """Return a context from RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE."""
        rank = int(os.environ.get("RANK", "0"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(
            rank=rank,
            local_rank=int(os.environ.get("LOCAL_RANK", str(rank))),
            world_size=world_size,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        )

    def metric(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Report values, shown live and kept in ``run.metrics``.

        Raises:
            ConfigError: ``step`` is no whole number of 64 bits.
        """

    def bar(self, **state: Any) -> None:
        """Report the state of a progress bar: the fields of ``wire.Bar``."""

    def notice(self, text: str) -> None:
        """Show one line to the person; equal lines of several ranks are shown once."""

    def count_batch(self, total: int | None = None, number: int | None = None) -> None:
        """Count a batch that a prepared loader is about to give.

        Args:
            total: batches of a whole pass through the loader; None where nobody knows.
            number: of this batch in its pass, from 1 on, those included that a resumed pass left
                out; None counts the batches of the call.

        Raises:
            RunStopped: a stop was asked for, the function never reads ``should_stop``, and this
                is the step at which all ranks leave.
        """

    def count_step(self, device_memory: Callable[[], int | None] | None = None) -> None:
        """Count a step of a prepared optimizer; ``device_memory()`` returns bytes in use."""

    def should_stop(self) -> bool:
        """Whether a stop was asked for; it turns True at the same read on all ranks."""
        return False

    def note_training(self, training: Training) -> None:
        """Set the training whose state is saved if the run is stopped."""

    def note_group(self) -> None:
        """Note that the rank has joined a process group."""


class LaunchedContext(RankContext):
    """Context of a rank that notebook_accel started: it reports to its agent."""

    launched = True

    def __init__(
        self,
        *,
        run: str,
        send: Callable[[wire.Message], None],
        board: Scoreboard,
        store_port: StorePort | None = None,
        **numbers: Any,
    ) -> None:
        """Make the context; ``numbers`` are the arguments of :class:`RankContext`."""
        super().__init__(**numbers)
        self.run = run
        self.store_port = store_port
        self.call = 0
        self.made_group = False
        self.lost_group = False
        self.send = send
        self._board = board
        self._row = board.row(self.local_rank)
        self._pid = os.getpid()
        self._next_memory = 0.0
        # How many batches were given before the pass, and its length, as the board has them.
        self._pass: tuple[int, int | None] = (0, None)
        # That in which the last step was made, and how many of its batches had been given then.
        self._stepped: tuple[tuple[int, int | None], int] | None = None
        # Within a call it is kept; between calls it is the user's to drop.
        self._training: Training | None = None
        self._any_training: weakref.ref[Training] | None = None

    @property
    def is_own_process(self) -> bool:
        """Whether this is the rank's process, and no child that it forked."""
        return os.getpid() == self._pid

    def count_on(self, board: Scoreboard) -> None:
        """Use another scoreboard from now on, in a child that the rank forked.

        The rank's own row must count the rank alone, and other ranks must not wait for the child.
        """
        self._board, self._row = board, board.row(self.local_rank)
        self._pass = (0, None)

    def begin_call(self, number: int, *, has_group: bool) -> None:
        """Begin the call of this number: counts and reports belong to it from now on.

        Args:
            number: of the call.
            has_group: whether the rank is in a process group already.
        """
        self.call = number
        self.made_group = has_group
        self.lost_group = False
        self._pass, self._stepped = (0, None), None

    def end_call(self) -> None:
        """End the call: forget the training that it noted."""
        self._training = None
        # A validation mostly comes last, and how far the training came is what people ask.
        if self._stepped is not None and self._stepped[0] != self._pass:
            (_, total), done = self._stepped
            self._row.pass_start = self._row.batches - done
            self._row.total_batches = int(total or 0)

    def note_group(self) -> None:
        self.made_group = True

    def note_training(self, training: Training) -> None:
        self._training, self._any_training = training, weakref.ref(training)

    def parts_to_rescue(self) -> Iterator[object]:
        """Yield this rank's part of the training state in several forms; nothing if none is set."""
        training = self._training
        # What an earlier call prepared counts as trained in this call once this call has taken a
        # batch or made a step.
        if training is None and self._any_training and (self._row.batches or self._row.steps):
            training = self._any_training()
        return iter(()) if training is None else training.parts_to_rescue(self._row.steps)

    def message(self, kind: type[wire.M], /, **fields: Any) -> wire.M:
        """Return a message of this rank about its current call."""
        return kind(run=self.run, call=self.call, rank=self.rank, **fields)

    def report(self, kind: type[wire.Message], /, **fields: Any) -> None:
        """Send a message of this rank, unless this is a child process of it."""
        if self.is_own_process:
            self.send(self.message(kind, **fields))

    def metric(self, values: Mapping[str, float], step: int | None = None) -> None:
        numbers = {str(name): float(value) for name, value in values.items()}
        self.report(wire.Metric, values=numbers, step=None if step is None else _whole(step))

    def bar(self, **state: Any) -> None:
        self.report(wire.Bar, **state)

    def notice(self, text: str) -> None:
        self.report(wire.Notice, text=text)

    def count_batch(self, total: int | None = None, number: int | None = None) -> None:
        row = self._row
        row.batches = batches = row.batches + 1
        # The same for all batches of a pass, unless another loader's were given between them.
        start = 0 if number is None else batches - number
        if (start, total) != self._pass:
            self._pass = start, total
            row.pass_start = start
            row.total_batches = int(total or 0)
        if not self._board.stop_asked:
            row.passed_batches = batches
        elif not row.reads and self._board.leaves(self.local_rank, "batches"):
            raise RunStopped("the run was stopped")

    def count_step(self, device_memory: Callable[[], int | None] | None = None) -> None:
        row = self._row
        row.steps += 1
        self._stepped = self._pass, row.batches - self._pass[0]
        if device_memory is None:
            return
        now = time.monotonic()
        if now >= self._next_memory:
            self._next_memory = now + _MEMORY_SECONDS
            row.device_memory = device_memory() or 0

    def should_stop(self) -> bool:
        row = self._row
        row.reads = reads = row.reads + 1
        if self._board.stop_asked:
            return self._board.leaves(self.local_rank, "reads")
        row.passed_reads = reads
        return False


def _whole(step: Any) -> int:
    """Return a step as an int; NumPy's and torch's integers are accepted."""
    try:
        number = int(step)
    except (TypeError, ValueError, OverflowError):
        number = 2**63
    if not -(2**63) <= number < 2**63:
        raise ConfigError(
            f"step={step!r} is no whole number of 64 bits: give the count of steps or batches so "
            "far, such as step=100, or no step at all"
        )
    return number


_context: ContextVar[RankContext | None] = ContextVar("notebook_accel_rank", default=None)
_process_context: RankContext | None = None
_lock = threading.Lock()


def current() -> RankContext:
    """Return the context of this rank.

    A thread that the user's code started has no ContextVar of its rank, and gets the context of the
    process.
    """
    global _process_context
    context = _context.get()
    if context is None:
        context = _process_context
    if context is not None:
        return context
    with _lock:  # only the first question takes the lock: loops ask at every step
        if _process_context is None:
            _process_context = RankContext.from_environment()
        return _process_context


def has_context() -> bool:
    """Return whether this rank has a context yet: the first :func:`current` makes it."""
    return (_context.get() or _process_context) is not None


def enter(context: RankContext, *, whole_process: bool = True) -> None:
    """Make ``context`` that of this thread, and by default of the whole process."""
    global _process_context
    _context.set(context)
    if whole_process:
        _process_context = context


def has_process_group() -> bool:
    """Whether this process has a default process group, whoever made it; imports no torch."""
    distributed: Any = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())
