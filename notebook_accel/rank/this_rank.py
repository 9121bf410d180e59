"""The context of this rank: its numbers, its reports to the notebook, and requests to stop.

Through this module the ``training`` package talks to whatever has launched the process. Training
code asks :func:`current`, and need not know who started it. In a rank that notebook_accel started,
the answer is a :class:`LaunchedContext`, which reports to the rank's agent (the process that
started it). Anywhere else (plain Python, torchrun, a notebook's kernel) it is a
:class:`RankContext`, which has its numbers from environment variables and drops every report.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from notebook_accel import wire
from notebook_accel.actions.scoreboard import STOP, Scoreboard
from notebook_accel.errors import ConfigError, NotebookAccelError, RunStopped

# Between two questions for the memory of a device: at each step it would slow the loop down.
_MEMORY_SECONDS = 1.0
# How long a rank that was interrupted waits for its device, or three of its steps if that is more.
_DEVICE_SECONDS = 2.0
_STEPS = 3
# Different warnings that a rank reports in a call; its log has all.
_MAX_WARNINGS = 50
_NOT_READ = (
    "nothing is saved so far: the function has not read accelerator.should_save, after which it "
    "writes a checkpoint; one that begins with accelerator.resume_or_start(folder) needs no line"
)
# A rank may step optimizers of its own between two collectives. More steps than these in a row are
# taken for those of ranks that all train on their own.
_STEPS_OF_ONE_RANK = 20
# The longest pause between two looks at the device.
_LOOK_SECONDS = 0.005


class StorePort(NamedTuple):
    """Address of the ``TCPStore`` of a run's process groups, reserved before any rank began."""

    host: str
    port: int
    listener: socket.socket | None


class DeviceMemory(NamedTuple):
    """Bytes on a device, as torch counts them; 0 if unknown."""

    used: int = 0
    peak: int = 0
    limit: int = 0


# Returns the memory of a device, or None if unknown.
MemoryReader = Callable[[], DeviceMemory | None]


class Training(Protocol):
    """Protocol of a training whose state can be saved when the run is stopped."""

    @property
    def optimizers(self) -> Sequence[object]:
        """Those that were prepared."""

    def memory_parts(self, error: BaseException) -> dict[str, int]:
        """Return bytes in the device's memory by part, if ``error`` says that it is full.

        The parts are the training's weights, gradients and optimizer, and the rest where the whole
        is known. The dictionary is empty for other errors.
        """

    def off_device(self) -> AbstractContextManager[None]:
        """Return a context within which what was prepared lies on the host."""

    def resume(self) -> None:
        """Load the checkpoint with which the call begins."""

    def save(self, folder: str, *, unless: bool) -> str:
        """Write a checkpoint, unless some rank says not to, and say so; all ranks call it."""

    def parts_to_rescue(self, num_steps: int, free: int) -> Iterator[object]:
        """Yield this rank's part of the training state in several forms, the best first.

        The caller keeps the first form that can be pickled.

        Args:
            free: bytes of the host's memory that the copies may take.
        """


@dataclass
class KeptError:
    """An exception that a rank keeps, so that a debugger can look into its frames later.

    Attributes:
        debugger: the debugger of this exception, kept between the user's commands so that it stays
            in the frame that the user chose; None before the first command.
    """

    error: BaseException
    debugger: Any = None


class RankContext:
    """Context of a rank that drops all reports: of a single process, or of a rank under torchrun.

    It is also the base class of :class:`LaunchedContext`, which sends reports.

    Attributes:
        call: number of the current call, the same on all ranks; 0 before the first call and outside
            of notebook_accel.
        resume_from: folder of the checkpoint with which the training of this call begins, until it
            is loaded; else "".
        before_return: functions that run when the user's function has ended well (it returned, or
            raised ``RunStopped`` or ``SystemExit(0)``), before the rank reports the end of the
            call. The key of each function is the object that registered the function.
        save_here: writes a checkpoint at a common point; None if the user's function does it, once
            ``should_save`` is True.
        kept_error: the exception, kept for a debugger, of the newest call with ``keeps_error``
            (``wire.BeginCall``); None if that call raised no exception, or if there was no such
            call.
        store_port: address of the store at which ranks make their process groups; None if the store
            is at MASTER_ADDR and MASTER_PORT.
        left_with_all: whether a stop or an interrupt has ended the rank's loop, in the current
            call, at the same point as all other ranks' loops.
        is_interrupted: whether the current call was interrupted.
        is_stepping: whether a prepared optimizer is within its step.
    """

    launched = False
    left_with_all = is_interrupted = is_stepping = False
    call = 0
    resume_from = ""
    kept_error: KeptError | None = None
    store_port: StorePort | None = None

    def __init__(
        self, *, rank: int, local_rank: int, world_size: int, local_world_size: int
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.local_world_size = local_world_size
        self.shared: dict[Any, Any] = {}
        self.before_return: dict[Any, Callable[[], None]] = {}
        self.first_knobs: dict[str, wire.KnobValue] = {}
        self.knobs: dict[str, wire.KnobValue] = {}
        self.knobs_made: dict[str, Any] = {}
        self.save_here: Callable[[], object] | None = None

    @classmethod
    def from_environment(cls) -> RankContext:
        """Return a context from torchrun's RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE.

        Without these variables, return the context of a single process.
        """
        rank = int(os.environ.get("RANK", "0"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(
            rank=rank,
            local_rank=int(os.environ.get("LOCAL_RANK", str(rank))),
            world_size=world_size,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        )

    def report(self, kind: type[wire.Message], /, **fields: Any) -> None:
        """Send the kernel a message about the current call; a no-op in this base class."""

    def metric(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Report metrics, shown live and kept in ``run.metrics``; a no-op in this base class.

        Args:
            step: the step that the metrics belong to; None for no step.
        """

    def notice(self, text: str) -> None:
        """Show a line to the user, only once if several ranks send it; a no-op in this class."""

    def note_warning(self, text: str) -> None:
        """Report a Python warning that this rank has shown; a no-op in this base class."""

    def count_batch(self, total: int | None = None, number: int | None = None) -> None:
        """Count a batch that a prepared loader is about to give; a no-op in this base class.

        All ranks must count the same number of batches: after a request to stop, each rank waits
        here until it is known at which batch all ranks leave.

        Args:
            total: number of batches in one pass through the loader; None if unknown.
            number: number of this batch in its pass, from 1 on; batches that a resumed pass skipped
                count. With None, the progress shown is the number of batches in the whole call.
        """

    def begin_step(self) -> None:
        """Note that a prepared optimizer is about to step; a no-op in this base class.

        In a loop without a prepared loader, ranks leave here after a request to stop, as at a batch
        (:meth:`count_batch`).
        """

    def count_step(
        self, device_memory: MemoryReader | None = None, *, skipped: bool = False
    ) -> None:
        """Count a step of a prepared optimizer that has ended; a no-op in this base class.

        Args:
            device_memory: returns the memory of the device, or None if unknown; called at most once
                a second, since it takes time. Without it, the memory is not measured.
        """

    def note_step_times(self, times: list[int]) -> None:
        """Report where the time of steps goes; a no-op in this base class."""

    def should_stop(self) -> bool:
        """Return whether a stop was asked for; always False in this base class.

        All ranks must call it equally often: it returns True from the same call on all of them, so
        that they leave their loops together.
        """
        return False

    def settle_device(self) -> None:
        """Wait until the device has done what was queued, before its memory is saved."""
        wait_for_device()

    @property
    def num_steps(self) -> int | None:
        """Number of this call's steps; None in this base class, which does not count.

        Without a prepared optimizer, batches count, and without these the common points.
        """
        return None

    def set_knobs(self, values: Mapping[str, wire.KnobValue]) -> None:
        """Give knobs new values; those that are made later begin with theirs."""
        self.knobs |= values
        for name, value in values.items():
            if name in self.knobs_made:
                self.knobs_made[name].take(value)

    def should_save(self) -> bool:
        """Return whether a save was asked for at this step; always False in this base class.

        All ranks must call it equally often.
        """
        return False

    def note_training(self, training: Training, about: str) -> None:
        """Set which training is saved if the run is stopped; a no-op in this base class.

        Args:
            about: device, precision and strategy, shown to the user.
        """

    def begin_training(self) -> None:
        """Load ``resume_from`` before the first batch or forward; a no-op in this base class."""

    def note_group(self) -> None:
        """Record that the rank has joined a process group; a no-op in this base class."""


class LaunchedContext(RankContext):
    """Context of a rank that notebook_accel started: it reports to the rank's agent.

    The agent is the process that started the rank.
    """

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
        super().__init__(**numbers)
        self.run = run
        self.store_port = store_port
        self.send = send
        self._board = board
        self._row = board.row(self.local_rank)
        self._pid = os.getpid()
        self._next_memory = 0.0
        # Each call of a session says it anew.
        self._about = ""
        self.begin_call(wire.BeginCall(payload=wire.Packet(), grace=0.0), has_group=False)
        # Within a call it is kept; between calls it is the user's to drop.
        self._training: Training | None = None
        self._any_training: weakref.ref[Training] | None = None

    @property
    def is_interrupted(self) -> bool:  # type: ignore[override]
        row = self._row
        return bool(self.call) and self.call in (row.interrupted_call, row.seen_interrupt)

    @property
    def is_own_process(self) -> bool:
        """Whether this code runs in the rank's process, and not in a child forked from it.

        A worker of a DataLoader is such a child, for example.
        """
        return os.getpid() == self._pid

    def begin_call(self, message: wire.BeginCall, *, has_group: bool) -> None:
        self.call = message.call
        self.made_group = has_group
        self.lost_group = self.left_with_all = self.is_stepping = False
        self._grace = message.grace
        # The optimizer that was stepped last without being prepared, and those within its step; all
        # such, and what frees their device; the collectives at the last step, how often they
        # changed, and steps since.
        self._plain: weakref.ref[Any] | None = None
        self._inner: set[int] = set()
        self._all_plain: weakref.WeakSet[Any] = weakref.WeakSet()
        self._off_device: Callable[[Any], AbstractContextManager[None]] | None = None
        self._collectives, self._num_rounds, self._num_in_round = 0, 0, 0
        self._step_seconds, self._step_began = 0.0, time.monotonic()
        # How many batches were given before the pass, and its length, as the board has them.
        self._pass: tuple[int, int | None] = (0, None)
        # That in which the last step was made, and how many of its batches had been given then.
        self._stepped: tuple[tuple[int, int | None], int] | None = None
        self._step_times: list[int] = []
        self._did = 0
        self._save_is_due, self._saves_at = False, (0, 0, 0, 0)
        self.resume_from, self.first_knobs = message.resume, message.knobs
        self.knobs, self.knobs_made, self.save_here = {**self.first_knobs}, {}, None
        self._warnings: set[str] = set()
        self._say_about(self._about)

    def count_on(self, board: Scoreboard) -> None:
        """Use another scoreboard from now on; to be called in a child process of the rank.

        With the rank's scoreboard, the child's batches and steps would count as those of the rank,
        and at a stop other ranks would wait for the child.
        """
        self._board, self._row = board, board.row(self.local_rank)
        self._did = 0
        self._pass = (0, None)

    def end_call(self) -> None:
        """End the call: forget its training, and show the progress of the last pass with a step.

        A pass is one iteration over a loader. The last pass of a call is mostly a validation, which
        makes no optimizer steps, but the user wants to know how far the training came.
        """
        self._training = None
        if self._step_times:
            self.note_step_times(self._step_times)
        # A validation mostly comes last, and how far the training came is what people ask.
        if self._stepped is not None and self._stepped[0] != self._pass:
            (_, total), done = self._stepped
            self._row.pass_start = self._row.batches - done
            self._row.total_batches = int(total or 0)

    def note_group(self) -> None:
        self.made_group = True

    def note_training(self, training: Training, about: str) -> None:
        self._training, self._any_training = training, weakref.ref(training)
        if about != self._about:
            self._say_about(about)

    def _say_about(self, about: str) -> None:
        self._about = about
        if about and self.rank == 0:
            self.report(wire.Notice, kind="training", text=about)

    def begin_training(self) -> None:
        if self.resume_from and self._training is not None:
            self._training.resume()

    def parts_to_rescue(self, free: int) -> Iterator[object]:
        """Yield this rank's part of the training state in several forms, the best first.

        It yields nothing if nothing was trained in the current call, if the state is not of one
        step, or if there is no room: ``free`` is the number of bytes that the copies may take.
        """
        training = self._training
        # What an earlier call prepared counts as trained in this call once this call has taken a
        # batch or made a step.
        if training is None and (self._row.batches or self._row.steps):
            training = self._newest_training()
        if training is None:
            return iter(())
        # Where collectives are asynchronous, a rank that was interrupted within a step may hold
        # half of it, and after its groups were aborted anything.
        is_done, is_asynchronous = self.device_is_done(), self._row.is_asynchronous
        if not is_done or (is_asynchronous and (self.lost_group or self.is_stepping)):
            self.notice("what was being trained is not kept: the ranks were within a step")
            return iter(())
        return training.parts_to_rescue(self._row.steps, free)

    def _newest_training(self) -> Training | None:
        """Return what was prepared last, in this call or an earlier one, if it still exists."""
        return self._any_training() if self._any_training else None

    def memory_parts(self, error: BaseException) -> dict[str, int]:
        """Return bytes in the device's memory by part, if ``error`` says that it is full."""
        training = self._newest_training()
        return training.memory_parts(error) if training else {}

    def message(self, kind: type[wire.M], /, **fields: Any) -> wire.M:
        return kind(run=self.run, call=self.call, rank=self.rank, **fields)

    def report(self, kind: type[wire.Message], /, **fields: Any) -> None:
        # A child that the rank forked is another process, of which the agent knows nothing.
        if self.is_own_process:
            self.send(self.message(kind, **fields))

    def metric(self, values: Mapping[str, float], step: int | None = None) -> None:
        numbers = {str(name): float(value) for name, value in values.items()}
        self.report(wire.Metric, values=numbers, step=None if step is None else _whole(step))

    def notice(self, text: str) -> None:
        self.report(wire.Notice, text=text)

    def note_warning(self, text: str) -> None:
        if text not in self._warnings and len(self._warnings) < _MAX_WARNINGS:
            self._warnings.add(text)
            self.report(wire.Notice, kind="warning", text=text)

    def count_batch(self, total: int | None = None, number: int | None = None) -> None:
        row = self._row
        row.batches = batches = row.batches + 1
        # The same for all batches of a pass, unless another loader's were given between them.
        start = 0 if number is None else batches - number
        if (start, total) != self._pass:
            self._pass = start, total
            row.pass_start = start
            row.total_batches = int(total or 0)
        if self._board.asked == self._did:
            row.passed_batches = batches
        elif self._acts("batches"):
            self._leave()

    def note_step_times(self, times: list[int]) -> None:
        self._step_times = times
        self._row.step_times[:] = [*times]

    def _leave(self) -> None:
        self.left_with_all = True
        if self._board.interrupts:
            self._row.seen_interrupt = self.call
            raise KeyboardInterrupt
        raise RunStopped("the run was stopped")

    def begin_step(self, begun: int | None = None) -> None:
        row = self._row
        begun = row.begun + 1 if begun is None else begun
        if begun > row.begun and not (row.batches or row.reads):
            row.begun = begun
            if self._board.asked == self._did:
                row.passed_begun = begun
            elif self._acts("begun"):
                self._leave()
        self.is_stepping = True
        self._inner.clear()

    def count_step(
        self, device_memory: MemoryReader | None = None, *, skipped: bool = False
    ) -> None:
        row = self._row
        self.is_stepping = False
        if skipped:
            return
        row.steps += 1
        self._stepped = self._pass, row.batches - self._pass[0]
        now = time.monotonic()
        self._step_seconds, self._step_began = now - self._step_began, now
        if device_memory is None:
            return
        if now >= self._next_memory:
            self._next_memory = now + _MEMORY_SECONDS
            found = device_memory() or DeviceMemory()
            row.device_memory, row.device_peak, row.device_limit = found

    def begin_plain_step(
        self,
        optimizer: Any,
        num_collectives: Callable[[], int],
        off_device: Callable[[Any], AbstractContextManager[None]],
    ) -> None:
        """Count the step of an optimizer in a call that has prepared nothing.

        A step within another optimizer's step is none of its own. One rank may step an optimizer
        that the others do not have, so that steps alone are no common points: the first step after
        a collective is one.

        Args:
            num_collectives: returns how many this process has begun; asked where the step counts.
        """
        # A thread of the user's has no context of its own, and steps on each rank when it likes.
        is_here = _context.get() is self and self.is_own_process
        if not (is_here and self._training is None):
            return
        # One that begins anew had an error in its last step, which the function has caught; one
        # that begins twice within another's, in that one's.
        is_known = self._plain is not None and self._plain() is optimizer
        if not (is_known or not self.is_stepping or id(optimizer) in self._inner):
            self._inner.add(id(optimizer))
            return
        if not is_known:
            self._plain, self._off_device = weakref.ref(optimizer), off_device
            self._all_plain.add(optimizer)
        if (collectives := num_collectives()) != self._collectives:
            self._collectives, self._num_in_round = collectives, 0
            self._num_rounds += 1
        self._num_in_round += 1
        own = _STEPS_OF_ONE_RANK if self._num_rounds and self.world_size > 1 else 0
        self.begin_step((self._num_rounds << 32) + max(1, self._num_in_round - own))

    def end_plain_step(
        self, optimizer: Any, device_memory: Callable[[Any], DeviceMemory | None]
    ) -> None:
        if self.is_stepping and self._plain is not None and self._plain() is optimizer:
            self.count_step(partial(device_memory, optimizer))

    @property
    def num_steps(self) -> int | None:
        row, training = self._row, self._newest_training()
        if row.steps or (training is not None and training.optimizers):
            return row.steps
        return row.batches or row.reads or row.saves

    def should_stop(self) -> bool:
        row = self._row
        row.reads = reads = row.reads + 1
        if self._board.asked == self._did:
            row.passed_reads = reads
            return False
        leaves = self._acts("reads")
        if leaves and self._board.interrupts:
            self._leave()
        return leaves

    def device_is_done(self, index: int | None = None) -> bool:
        """Wait until the device has done what this rank queued; return whether it has.

        Called after a stop or an interrupt, when it may wait for what another rank never queues.

        Args:
            index: of the device; None for that of the calling thread.
        """
        steps = self._grace if self.left_with_all else _STEPS * self._step_seconds
        return wait_for_device(max(_DEVICE_SECONDS, min(steps, self._grace)), index)

    def settle_device(self) -> None:
        wait_for_device()
        if self.lost_group and self._row.is_asynchronous:
            raise NotebookAccelError(
                "the process groups were aborted, since the device waited for a rank that had left "
                "within a step: what it holds is of no step, and is not saved"
            )

    def should_save(self) -> bool:
        row = self._row
        if self._board.asked == self._did:
            row.passed_saves = row.saves = row.saves + 1
        else:
            row.saves += 1
            self._acts("saves")
        here = row.batches, row.reads, row.begun, self._num_in_round
        if self._save_is_due:
            # At the first read since: a validation, which came to the point, may read nothing.
            self._save_is_due, self._saves_at = False, here
            return True
        # Where reads of it are the only points, each is a step of its own.
        return self._saves_at == here and any(here)

    def _acts(self, counter: str) -> bool:
        """Do what is asked, if this is the point; return whether that is a stop."""
        number, content = self._board.due(self.local_rank, counter) or (0, b"")
        if number in (0, STOP):
            return number == STOP
        self._did = number
        action = msgspec.msgpack.decode(content, type=wire.Action)
        if action.kind == "pause":
            # Also while the state is moved: of a large one that takes longer than most steps, and a
            # stop must not take the rank for stuck.
            self._row.paused, began = 1, time.monotonic()
            try:
                with self._devices_freed():
                    self._log("paused")
                    self._board.wait_in_pause(self.local_rank, number)
            finally:
                self._row.paused = 0
            self._step_began += time.monotonic() - began
            self._log("goes on")
            return False
        values = (f"{name}={value!r}" for name, value in action.values.items())
        self._log(", ".join(values) or action.kind)
        if action.kind == "set":
            self.set_knobs(action.values)
        elif action.kind == "save" and self.save_here is not None:
            self.save_here()
        elif action.kind == "save" and counter == "saves":
            self._save_is_due = True  # rank 0 may be the only one that comes here
        else:
            is_save = action.kind == "save"
            self._save_is_due = self._save_is_due or is_save
            if training := self._newest_training():
                said = training.save(action.folder, unless=is_save and self._row.saves > 0)
                if is_save and said:
                    self.notice(said)
            elif is_save and self.rank == 0 and not self._row.saves:
                self.notice(_NOT_READ)
        self._row.done = number
        return False

    def _devices_freed(self) -> AbstractContextManager[None]:
        if training := self._newest_training():
            return training.off_device()
        optimizers = [*self._all_plain]
        if not optimizers or self._off_device is None:
            return contextlib.nullcontext()
        return self._off_device(optimizers)

    def _log(self, action: str) -> None:
        """Write what all ranks do here into the log, where rank 0 prints."""
        if self.rank == 0:
            with contextlib.suppress(Exception):  # the function may have closed it
                sys.stderr.write(f"notebook_accel: {action} (step {self.num_steps:,})\n")
                sys.stderr.flush()


def _whole(step: Any) -> int:
    """Return a step as an int; numbers of NumPy and torch are accepted."""
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
    """Return the context of the rank in which this code runs.

    If ranks are threads of one process, each of these threads has a context of its own, in a
    ContextVar. A thread that the user's code started has none, and gets the context of the process.
    In a process without a context, the first call makes one from the environment variables.
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
    """Return whether a context exists already; if none does, :func:`current` will make one."""
    return (_context.get() or _process_context) is not None


def enter(context: RankContext, *, whole_process: bool = True) -> None:
    """Have :func:`current` return ``context`` in this thread from now on.

    Args:
        whole_process: whether threads without a context of their own get ``context``, too.
    """
    global _process_context
    _context.set(context)
    if whole_process:
        _process_context = context


def wait_for_device(seconds: float | None = None, index: int | None = None) -> bool:
    """Wait until an accelerator has done what is queued on it; return False if it takes too long.

    It polls, so that an interrupt ends it, and threads run that may free the device; a blocking
    copy may hold the GIL meanwhile.

    Args:
        index: of the accelerator; None for the current one.
    """
    torch: Any = sys.modules.get("torch")
    kind = torch and torch.accelerator.current_accelerator()
    # A device without this function (XLA) runs what is asked of it when it is read.
    is_used = getattr(kind and torch.get_device_module(kind), "is_initialized", None)
    if is_used is None or not is_used():
        return True
    event = torch.accelerator.current_stream(index).record_event()
    deadline, pause = None if seconds is None else time.monotonic() + seconds, 0.0001
    while not event.query():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LOOK_SECONDS)
    return True


def has_process_group() -> bool:
    """Return whether this process has a default process group, whoever made it.

    It does not import torch: a process that has not imported torch has no group.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())
